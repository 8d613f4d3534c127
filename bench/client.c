/* The client of the benchmark: moves data like dd, in one or several processes, each with a file of its own.
 *
 *   client read|write|fresh BLOCK FILE_BYTES SECONDS FILE...
 *
 * read, write: block after block through the file, from its begin again at its end, until the time is up. fresh: the
 * file is emptied (not counted), then written once from begin to end, until the time is up. The buffer is allocated and
 * touched before the clock starts, and all processes start together. Prints for each process: bytes, seconds, calls.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef struct {
  uint64_t bytes, calls;
  double seconds;
} Result;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void die(const char *what) {
  fprintf(stderr, "client: %s: %s\n", what, strerror(errno));
  exit(1);
}

/* One pass through the file; ends early at the deadline. */
static void pass(int fd, int reading, char *buffer, uint64_t block, uint64_t size, double deadline, Result *result) {
  for (uint64_t at = 0; at < size; at += block) {
    uint64_t want = size - at < block ? size - at : block;
    for (uint64_t done = 0; done < want;) {
      ssize_t n = reading ? pread(fd, buffer + done, want - done, (off_t)(at + done))
                          : pwrite(fd, buffer + done, want - done, (off_t)(at + done));
      if (n < 0) die(reading ? "read" : "write");
      if (n == 0) {
        fprintf(stderr, "client: the file is too short\n");
        exit(1);
      }
      done += (uint64_t)n;
      result->bytes += (uint64_t)n;
      result->calls++;
    }
    if (now() >= deadline) return;
  }
}

static void work(const char *mode, uint64_t block, uint64_t size, double seconds, const char *path, int start, int out) {
  int reading = !strcmp(mode, "read"), fresh = !strcmp(mode, "fresh");
  int fd = open(path, reading ? O_RDONLY : O_WRONLY);
  if (fd < 0) die(path);
  char *buffer = mmap(NULL, block, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (buffer == MAP_FAILED) die("mmap");
  memset(buffer, 0x5a, block);
  char byte;
  if (read(start, &byte, 1) < 0) die("start"); /* the end of the pipe is the signal to start */
  Result result = {0, 0, 0};
  double begin = now();
  if (fresh) {
    while (now() - begin < seconds * 2 && result.seconds < seconds) {
      if (ftruncate(fd, 0)) die("ftruncate");
      double from = now();
      pass(fd, 0, buffer, block, size, from + seconds - result.seconds, &result);
      result.seconds += now() - from;
    }
  } else {
    while (now() - begin < seconds) pass(fd, reading, buffer, block, size, begin + seconds, &result);
    result.seconds = now() - begin;
  }
  if (write(out, &result, sizeof result) != sizeof result) die("result");
  _exit(0);
}

int main(int argc, char **argv) {
  if (argc < 6) {
    fprintf(stderr, "usage: client read|write|fresh BLOCK FILE_BYTES SECONDS FILE...\n");
    return 2;
  }
  uint64_t block = strtoull(argv[2], NULL, 10), size = strtoull(argv[3], NULL, 10);
  double seconds = atof(argv[4]);
  int count = argc - 5, start[2], out[2];
  if (pipe(start) || pipe(out)) die("pipe");
  for (int i = 0; i < count; i++) {
    pid_t child = fork();
    if (child < 0) die("fork");
    if (child == 0) {
      close(start[1]);
      work(argv[1], block, size, seconds, argv[5 + i], start[0], out[1]);
    }
  }
  usleep(20000); /* all have their buffers */
  close(start[1]);
  close(out[1]);
  Result result;
  int results = 0;
  while (read(out[0], &result, sizeof result) == sizeof result) {
    printf("%llu %.9f %llu\n", (unsigned long long)result.bytes, result.seconds, (unsigned long long)result.calls);
    results++;
  }
  while (wait(NULL) > 0) {
  }
  return results == count ? 0 : 1;
}
