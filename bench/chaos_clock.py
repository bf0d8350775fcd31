"""Wall clocks that can be moved while nodes run: a library that nodes are started with, compiled here.

It adds a number of nanoseconds, read from a file that all of them have mapped, to whatever the system says the time of
day is. The machine's own clock stays as it is, and clocks that only go forward are not touched.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path
from typing import Final

_SOURCE: Final = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *shift;

__attribute__((constructor)) static void begin(void) {
  int file = open(getenv("CHAOS_CLOCK"), O_RDONLY | O_CLOEXEC);
  void *found = file < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
  if (found != MAP_FAILED) shift = found;
  if (file >= 0) close(file);
}

int clock_gettime(clockid_t which, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(which, now);
  if (code == 0 && shift && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) {
    int64_t ns = now->tv_sec * 1000000000LL + now->tv_nsec + *shift;
    now->tv_sec = ns / 1000000000LL;
    now->tv_nsec = ns % 1000000000LL;
  }
  return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec exact;
  int code = clock_gettime(CLOCK_REALTIME, &exact);
  (void)zone;
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return code;
}

time_t time(time_t *out) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (out) *out = exact.tv_sec;
  return exact.tv_sec;
}
"""


class WallClock:
    """In that folder: `environment` is that of the processes whose wall clock `move` moves."""

    def __init__(self, folder: Path) -> None:
        library = folder / "clock.so"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(library), "-ldl"], input=_SOURCE, text=True,
            check=True,
        )  # fmt: skip
        self._file = folder / "clock.shift"
        self._file.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(self._file)}

    def move(self, by_s: float) -> None:
        """From now on it is off by so many seconds, forward or back."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("=q", int(by_s * 1e9)))


def why_not() -> str | None:
    return None if shutil.which("cc") else "there is no C compiler, which the moving wall clock is made with"
