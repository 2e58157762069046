/* A wall clock that can jump while the process runs: preloaded, it adds an offset to CLOCK_REALTIME and to nothing else.
 *
 * SHIM_CLOCK_OFFSET  a file that holds the offset in seconds (it may be negative or have a fraction), read again
 *                             on every call
 *
 * Monotonic clocks and every wait of the kernel stay true, as they do when an operator sets the time of a machine.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long long offset_ns(void) {
    const char *path = getenv("SHIM_CLOCK_OFFSET");
    char text[64];
    int saved = errno;
    ssize_t got = -1;
    if (path == NULL) return 0;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        got = syscall(SYS_read, fd, text, sizeof text - 1);
        syscall(SYS_close, fd);
    }
    errno = saved;
    if (got <= 0) return 0;
    text[got] = 0;
    return (long long)(strtod(text, NULL) * 1e9);
}

static int true_time(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (real == NULL) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    return real(clock, now);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = true_time(clock, now);
    if (result != 0 || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE)) return result;
    long long whole = (long long)now->tv_sec * 1000000000LL + now->tv_nsec + offset_ns();
    if (whole < 0) whole = 0;
    now->tv_sec = (time_t)(whole / 1000000000LL);
    now->tv_nsec = (long)(whole % 1000000000LL);
    return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact) != 0) return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *into) {
    struct timespec exact;
    if (clock_gettime(CLOCK_REALTIME, &exact) != 0) return (time_t)-1;
    if (into != NULL) *into = exact.tv_sec;
    return exact.tv_sec;
}

int timespec_get(struct timespec *now, int base) {
    if (base != TIME_UTC) return 0;
    return clock_gettime(CLOCK_REALTIME, now) == 0 ? base : 0;
}
