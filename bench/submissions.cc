// How many operations a second threads can submit, through the C interface.
// Usage: bench-submissions DRIVER FILE THREADS OPERATIONS BYTES none|stream|batch
// Prints: seconds until the last thread has submitted all of its OPERATIONS, seconds until all were over, and the
// median and the 99th percentile of a submission's time in microseconds.
//   none    one at a time, in no order
//   stream  one at a time, each thread on a stream of the engine's
//   batch   64 at a time, in no order
#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "gpufs.h"

namespace {

using Clock = std::chrono::steady_clock;

void must(gpufs_status status) {
  if (status.error == 0) return;
  std::fprintf(stderr, "bench-submissions: %s\n", gpufs_message());
  std::exit(1);
}

double seconds_between(Clock::time_point start, Clock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}

}  // namespace

int main(int count, char** words) {
  if (count != 7) return 2;
  const int threads = std::atoi(words[3]);
  const std::uint64_t operations = std::strtoull(words[4], nullptr, 10);
  const std::uint64_t bytes = std::strtoull(words[5], nullptr, 10);
  const std::string mode = words[6];
  const std::uint64_t together = mode == "batch" ? 64 : 1;

  gpufs_engine_options options{};
  options.driver = words[1];
  options.devices = 1;
  options.memory_bytes = std::string(words[1]) == "host" ? std::uint64_t{1} << 30 : 0;
  gpufs_handle engine = 0;
  must(gpufs_engine_open(&options, &engine));
  gpufs_async_options limits{};
  limits.operations = operations * static_cast<std::uint64_t>(threads) + 64;
  limits.timeout_ms = 60000;
  must(gpufs_async_configure(engine, &limits));
  const int fd = ::open(words[2], O_RDONLY | O_CLOEXEC);
  gpufs_handle backing = 0;
  must(gpufs_backing_open(engine, fd, &backing));
  gpufs_handle buffer = 0;
  must(gpufs_buffer_create(engine, 0, &buffer));
  must(gpufs_buffer_resize(buffer, bytes * static_cast<std::uint64_t>(threads)));

  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::vector<Clock::time_point> submitted(static_cast<std::size_t>(threads));
  std::vector<Clock::time_point> over(static_cast<std::size_t>(threads));
  std::vector<std::vector<double>> times(static_cast<std::size_t>(threads));
  std::vector<std::thread> running;
  for (int number = 0; number < threads; ++number) {
    running.emplace_back([&, number] {
      const auto index = static_cast<std::size_t>(number);
      gpufs_handle queue = 0;
      must(gpufs_queue_open(engine, 0, &queue));
      gpufs_handle stream = 0;
      if (mode == "stream") must(gpufs_stream_open(engine, 0, nullptr, 0, &stream));
      std::vector<gpufs_operation> batch(together);
      for (gpufs_operation& operation : batch) {
        operation.transfer.backing = backing;
        operation.transfer.buffer = buffer;
        operation.transfer.bytes = bytes;
        operation.transfer.buffer_offset = bytes * index;
        operation.transfer.direction = GPUFS_LOAD;
        operation.stream = stream;
      }
      times[index].reserve(operations / together);
      ++ready;
      while (!go) std::this_thread::yield();
      for (std::uint64_t done = 0; done + together <= operations; done += together) {
        const Clock::time_point start = Clock::now();
        must(gpufs_queue_submit(queue, batch.data(), together, nullptr, nullptr));
        times[index].push_back(seconds_between(start, Clock::now()) * 1e6);
      }
      submitted[index] = Clock::now();
      std::vector<gpufs_completion> completions(operations);
      for (std::uint64_t collected = 0; collected + together <= operations;) {
        std::uint64_t some = 0;
        must(gpufs_queue_collect(queue, completions.data(), operations, operations - collected, -1, &some));
        for (std::uint64_t each = 0; each < some; ++each) {
          if (completions[each].outcome.error == 0 && completions[each].outcome.prefix == bytes) continue;
          std::fprintf(stderr, "bench-submissions: an operation failed: %s\n", completions[each].outcome.message);
          std::exit(1);
        }
        if (some == 0) break;
        collected += some;
      }
      over[index] = Clock::now();
    });
  }
  while (ready < threads) std::this_thread::yield();
  const Clock::time_point start = Clock::now();
  go = true;
  for (std::thread& thread : running) thread.join();
  std::vector<double> all;
  for (const std::vector<double>& each : times) all.insert(all.end(), each.begin(), each.end());
  std::sort(all.begin(), all.end());
  std::printf("%.6f %.6f %.3f %.3f\n", seconds_between(start, *std::max_element(submitted.begin(), submitted.end())),
              seconds_between(start, *std::max_element(over.begin(), over.end())), all[all.size() / 2],
              all[all.size() * 99 / 100]);
  must(gpufs_engine_close(engine));
}
