// What one thread does for a transfer: it takes pieces and moves them, so that file and device work overlap.
// A session belongs to the thread that runs it, with its stream, events and bounce slots.
// run_session() is called on a pool thread, inside TransferJob::serve().
#pragma once

namespace gpufs {

class TransferJob;
class Turn;

// Serves the job until it has no more pieces or the turn is over; all pieces that it took are complete on return.
void run_session(TransferJob& job, Turn& turn);

}  // namespace gpufs
