/* A witness of what a process sends, at the last moment before the kernel has it: preloaded, it writes down every request of its HTTP
 * client that carries an Idempotency-Key, and changes nothing.
 *
 * SHIM_SENDS_LOG  the file that gets a line for each: the time in seconds, and the key. Several processes may share one.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { HEAD_MAX = 4096, KEY_MAX = 256 };

static const char name[] = "\r\nIdempotency-Key: ";

static void note(const void *data, size_t size) {
    const char *path = getenv("SHIM_SENDS_LOG");
    if (path == NULL || size < 5 || memcmp(data, "POST ", 5) != 0) return;
    size_t head = size < HEAD_MAX ? size : HEAD_MAX;
    const char *found = memmem(data, head, name, sizeof name - 1);
    if (found == NULL) return;
    const char *key = found + sizeof name - 1;
    size_t left = head - (size_t)(key - (const char *)data);
    const char *end = memchr(key, '\r', left);
    if (end == NULL || end - key > KEY_MAX) return;
    struct timespec now;
    char line[KEY_MAX + 64];
    int saved = errno;
    clock_gettime(CLOCK_REALTIME, &now);
    int length = snprintf(line, sizeof line, "%lld.%09ld %.*s\n", (long long)now.tv_sec, now.tv_nsec, (int)(end - key), key);
    /* Raw system calls, because a wrapper is the very function this file replaces. One append is whole, even if others append. */
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0 || syscall(SYS_write, fd, line, (size_t)length) != length) abort();
    syscall(SYS_close, fd);
    errno = saved;
}

static void note_first(const struct iovec *parts, size_t count) {
    if (count > 0) note(parts[0].iov_base, parts[0].iov_len);
}

ssize_t write(int fd, const void *data, size_t size) {
    static ssize_t (*real)(int, const void *, size_t);
    if (real == NULL) real = (ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    note(data, size);
    return real(fd, data, size);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    static ssize_t (*real)(int, const struct iovec *, int);
    if (real == NULL) real = (ssize_t (*)(int, const struct iovec *, int))dlsym(RTLD_NEXT, "writev");
    note_first(parts, count > 0 ? (size_t)count : 0);
    return real(fd, parts, count);
}

ssize_t send(int fd, const void *data, size_t size, int flags) {
    static ssize_t (*real)(int, const void *, size_t, int);
    if (real == NULL) real = (ssize_t (*)(int, const void *, size_t, int))dlsym(RTLD_NEXT, "send");
    note(data, size);
    return real(fd, data, size, flags);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    static ssize_t (*real)(int, const struct msghdr *, int);
    if (real == NULL) real = (ssize_t (*)(int, const struct msghdr *, int))dlsym(RTLD_NEXT, "sendmsg");
    note_first(message->msg_iov, message->msg_iovlen);
    return real(fd, message, flags);
}
