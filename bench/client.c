/* The client of the benchmark: moves data like dd, in one or several processes, each with a file of its own.
 *
 *   client MODE BLOCK FILE_BYTES SECONDS FILE...
 *
 * read, write: block after block through the file, from its begin again at its end, until the time is up. fresh: the
 * file is emptied (not counted), then written once from begin to end, until the time is up. map: the largest byte of the
 * whole file, read through a shared mapping; each pass maps it again. open: open, read of a block and close.
 * create: open of a new file, write of a block and close; unlink: its removal. These two make and remove FILE.new by
 * turns, and count only their own half.
 *
 * The buffer is allocated and touched before the clock starts, and all processes start together. Prints for each
 * process: bytes, seconds, calls, and of the calls' times in seconds the median and the 99th percentile.
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
  double seconds, median, percentile99;
} Result;

enum { MOST_TIMES = 1 << 20 };
static float times[MOST_TIMES]; /* of the first calls, in seconds */

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void die(const char *what) {
  fprintf(stderr, "client: %s: %s\n", what, strerror(errno));
  exit(1);
}

static void count(Result *result, uint64_t bytes, double seconds) {
  if (result->calls < MOST_TIMES) times[result->calls] = (float)seconds;
  result->bytes += bytes;
  result->calls++;
}

static int in_order(const void *a, const void *b) {
  float left = *(const float *)a, right = *(const float *)b;
  return (left > right) - (left < right);
}

/* One pass through the file; ends early at the deadline. */
static void pass(int fd, int reading, char *buffer, uint64_t block, uint64_t size, double deadline, Result *result) {
  for (uint64_t at = 0; at < size; at += block) {
    uint64_t want = size - at < block ? size - at : block;
    double from = now();
    for (uint64_t done = 0; done < want;) {
      ssize_t n = reading ? pread(fd, buffer + done, want - done, (off_t)(at + done))
                          : pwrite(fd, buffer + done, want - done, (off_t)(at + done));
      if (n < 0) die(reading ? "read" : "write");
      if (n == 0) {
        fprintf(stderr, "client: the file is too short\n");
        exit(1);
      }
      done += (uint64_t)n;
    }
    double until = now();
    count(result, want, until - from);
    if (until >= deadline) return;
  }
}

/* The largest byte of the file, through a mapping. */
static void scan(int fd, uint64_t size, Result *result) {
  double from = now();
  const unsigned char *bytes = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
  if (bytes == MAP_FAILED) die("mmap");
  unsigned char largest = 0;
  for (uint64_t i = 0; i < size; i++) largest = bytes[i] > largest ? bytes[i] : largest;
  volatile unsigned char used = largest;
  (void)used;
  munmap((void *)bytes, size);
  count(result, size, now() - from);
}

/* One file is opened, read or written, and closed, or removed; returns the seconds of what is counted. */
static double touch_file(const char *mode, const char *path, const char *new_path, char *buffer, uint64_t block) {
  double from = now();
  int opens = !strcmp(mode, "open");
  int fd = opens ? open(path, O_RDONLY) : open(new_path, O_WRONLY | O_CREAT | O_EXCL, 0600);
  if (fd < 0) die(opens ? path : new_path);
  if ((opens ? read(fd, buffer, block) : write(fd, buffer, block)) != (ssize_t)block) die("a block");
  close(fd);
  double middle = now();
  if (!opens && unlink(new_path)) die("unlink");
  return !strcmp(mode, "unlink") ? now() - middle : middle - from;
}

static void work(const char *mode, uint64_t block, uint64_t size, double seconds, const char *path, int start, int out) {
  int reading = !strcmp(mode, "read"), fresh = !strcmp(mode, "fresh");
  int maps = !strcmp(mode, "map"), moves = reading || fresh || maps || !strcmp(mode, "write");
  char new_path[4096];
  snprintf(new_path, sizeof new_path, "%s.new", path);
  int fd = open(path, reading || maps || !moves ? O_RDONLY : O_WRONLY);
  if (fd < 0) die(path);
  char *buffer = mmap(NULL, block, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (buffer == MAP_FAILED) die("mmap");
  memset(buffer, 0x5a, block);
  char byte;
  if (read(start, &byte, 1) < 0) die("start"); /* the end of the pipe is the signal to start */
  Result result = {0, 0, 0, 0, 0};
  double begin = now();
  if (fresh) {
    while (now() - begin < seconds * 2 && result.seconds < seconds) {
      if (ftruncate(fd, 0)) die("ftruncate");
      double from = now();
      pass(fd, 0, buffer, block, size, from + seconds - result.seconds, &result);
      result.seconds += now() - from;
    }
  } else if (!moves) {
    while (now() - begin < seconds) {
      double taken = touch_file(mode, path, new_path, buffer, block);
      count(&result, block, taken);
      result.seconds += taken;
    }
  } else if (maps) {
    while (now() - begin < seconds) scan(fd, size, &result);
    result.seconds = now() - begin;
  } else {
    while (now() - begin < seconds) pass(fd, reading, buffer, block, size, begin + seconds, &result);
    result.seconds = now() - begin;
  }
  size_t timed = result.calls < MOST_TIMES ? result.calls : MOST_TIMES;
  qsort(times, timed, sizeof times[0], in_order);
  result.median = times[timed / 2];
  result.percentile99 = times[timed * 99 / 100];
  if (write(out, &result, sizeof result) != sizeof result) die("result");
  _exit(0);
}

int main(int argc, char **argv) {
  if (argc < 6) {
    fprintf(stderr, "usage: client read|write|fresh|map|open|create|unlink BLOCK FILE_BYTES SECONDS FILE...\n");
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
    printf("%llu %.9f %llu %.9f %.9f\n", (unsigned long long)result.bytes, result.seconds,
           (unsigned long long)result.calls, result.median, result.percentile99);
    results++;
  }
  while (wait(NULL) > 0) {
  }
  return results == count ? 0 : 1;
}
