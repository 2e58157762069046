/* A disk that fails, for one directory of one process: preloaded, it stands before the libc calls that change files.
 *
 * SHIM_DISK_PREFIX   only this directory and what lies under it are touched
 * SHIM_DISK_CONTROL  a file, read again on every call, so that a test can change it while the process runs
 *
 * The control file holds rules, separated by blanks; an empty file means a healthy disk:
 *     ERROR[-OPERATION][:SKIP]
 * ERROR is enospc, eio, edquot, erofs or short (a write takes only half of what it was given).
 * OPERATION is write, fsync, rename, truncate or create; without one the rule is for all of them.
 * SKIP is how many calls of that operation pass first, counted from when the process first saw these contents.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OP_WRITE, OP_FSYNC, OP_RENAME, OP_TRUNCATE, OP_CREATE, OP_COUNT };
enum { SHORT = -1 };

static const char *const op_names[OP_COUNT] = {"write", "fsync", "rename", "truncate", "create"};
static const struct { const char *name; int code; } errors[] = {
    {"enospc", ENOSPC}, {"eio", EIO}, {"edquot", EDQUOT}, {"erofs", EROFS}, {"short", SHORT}};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char seen[512];
static long calls[OP_COUNT];

/* Raw system calls, because the wrappers are the very functions this file replaces. */
static ssize_t read_control(char *into, size_t size) {
    const char *path = getenv("SHIM_DISK_CONTROL");
    if (path == NULL) return 0;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t got = syscall(SYS_read, fd, into, size - 1);
    syscall(SYS_close, fd);
    if (got < 0) got = 0;
    into[got] = 0;
    return got;
}

/* The verdict of one rule on an operation: 0 passes, SHORT shortens, anything else is the errno to fail with. */
static int judge(char *rule, int op) {
    long skip = 0;
    char *colon = strchr(rule, ':');
    if (colon != NULL) { *colon = 0; skip = strtol(colon + 1, NULL, 10); }
    char *dash = strchr(rule, '-');
    if (dash != NULL) {
        *dash = 0;
        if (strcmp(dash + 1, op_names[op]) != 0) return 0;
    }
    if (calls[op] <= skip) return 0;
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++)
        if (strcmp(rule, errors[i].name) == 0) return errors[i].code;
    return 0;
}

static int verdict(int op, const char *path) {
    const char *prefix = getenv("SHIM_DISK_PREFIX");
    if (prefix == NULL || strncmp(path, prefix, strlen(prefix)) != 0) return 0;
    /* A directory beside it whose name only begins the same is another directory. */
    if (path[strlen(prefix)] != '/' && path[strlen(prefix)] != 0) return 0;
    int saved = errno, found = 0;
    char rules[sizeof seen], *rest = NULL;
    pthread_mutex_lock(&lock);
    if (read_control(rules, sizeof rules) > 0) {
        if (strcmp(rules, seen) != 0) { strcpy(seen, rules); memset(calls, 0, sizeof calls); }
        calls[op]++;
        for (char *rule = strtok_r(rules, " \t\n", &rest); rule != NULL && found == 0; rule = strtok_r(NULL, " \t\n", &rest))
            found = judge(rule, op);
    } else {
        seen[0] = 0;
    }
    pthread_mutex_unlock(&lock);
    errno = saved;
    return found;
}

static int verdict_fd(int op, int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return verdict(op, path);
}

static int verdict_at(int op, int dirfd, const char *name) {
    char link[64], path[PATH_MAX * 2];
    if (name == NULL) return 0;
    if (name[0] == '/') return verdict(op, name);
    if (dirfd == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
    else snprintf(link, sizeof link, "/proc/self/fd/%d", dirfd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    if (length <= 0) return 0;
    snprintf(path + length, sizeof path - (size_t)length, "/%s", name);
    return verdict(op, path);
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (real == NULL) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)
#define FAIL_IF(code) \
    do { int failing = (code); if (failing > 0) { errno = failing; return -1; } } while (0)

ssize_t write(int fd, const void *data, size_t count) {
    REAL(ssize_t, "write", int, const void *, size_t);
    int found = verdict_fd(OP_WRITE, fd);
    FAIL_IF(found);
    return real(fd, data, found == SHORT && count > 1 ? count / 2 : count);
}

#define PWRITE(function) \
    ssize_t function(int fd, const void *data, size_t count, off_t offset) { \
        REAL(ssize_t, #function, int, const void *, size_t, off_t); \
        int found = verdict_fd(OP_WRITE, fd); \
        FAIL_IF(found); \
        return real(fd, data, found == SHORT && count > 1 ? count / 2 : count, offset); \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

/* A vector that must be short loses its later parts, and half of its only part. */
ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(ssize_t, "writev", int, const struct iovec *, int);
    int found = verdict_fd(OP_WRITE, fd);
    FAIL_IF(found);
    if (found == SHORT && count == 1) return syscall(SYS_write, fd, parts[0].iov_base, (parts[0].iov_len + 1) / 2);
    return real(fd, parts, found == SHORT ? (count + 1) / 2 : count);
}

#define PWRITEV(function) \
    ssize_t function(int fd, const struct iovec *parts, int count, off_t offset) { \
        REAL(ssize_t, #function, int, const struct iovec *, int, off_t); \
        int found = verdict_fd(OP_WRITE, fd); \
        FAIL_IF(found); \
        return real(fd, parts, found == SHORT && count > 1 ? count / 2 : count, offset); \
    }
PWRITEV(pwritev)
PWRITEV(pwritev64)

#define PWRITEV2(function) \
    ssize_t function(int fd, const struct iovec *parts, int count, off_t offset, int flags) { \
        REAL(ssize_t, #function, int, const struct iovec *, int, off_t, int); \
        int found = verdict_fd(OP_WRITE, fd); \
        FAIL_IF(found); \
        return real(fd, parts, found == SHORT && count > 1 ? count / 2 : count, offset, flags); \
    }
PWRITEV2(pwritev2)
PWRITEV2(pwritev64v2)

#define SYNC(function) \
    int function(int fd) { \
        REAL(int, #function, int); \
        FAIL_IF(verdict_fd(OP_FSYNC, fd)); \
        return real(fd); \
    }
SYNC(fsync)
SYNC(fdatasync)

#define TRUNCATE(function) \
    int function(int fd, off_t length) { \
        REAL(int, #function, int, off_t); \
        FAIL_IF(verdict_fd(OP_TRUNCATE, fd)); \
        return real(fd, length); \
    }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

int fallocate(int fd, int mode, off_t offset, off_t length) {
    REAL(int, "fallocate", int, int, off_t, off_t);
    FAIL_IF(verdict_fd(OP_TRUNCATE, fd));
    return real(fd, mode, offset, length);
}

/* This one hands its error back instead of setting errno. */
int posix_fallocate(int fd, off_t offset, off_t length) {
    REAL(int, "posix_fallocate", int, off_t, off_t);
    int found = verdict_fd(OP_TRUNCATE, fd);
    return found > 0 ? found : real(fd, offset, length);
}

int rename(const char *from, const char *to) {
    REAL(int, "rename", const char *, const char *);
    FAIL_IF(verdict_at(OP_RENAME, AT_FDCWD, to));
    return real(from, to);
}

int renameat(int from_dir, const char *from, int to_dir, const char *to) {
    REAL(int, "renameat", int, const char *, int, const char *);
    FAIL_IF(verdict_at(OP_RENAME, to_dir, to));
    return real(from_dir, from, to_dir, to);
}

int renameat2(int from_dir, const char *from, int to_dir, const char *to, unsigned int flags) {
    REAL(int, "renameat2", int, const char *, int, const char *, unsigned int);
    FAIL_IF(verdict_at(OP_RENAME, to_dir, to));
    return real(from_dir, from, to_dir, to, flags);
}

int link(const char *from, const char *to) {
    REAL(int, "link", const char *, const char *);
    FAIL_IF(verdict_at(OP_RENAME, AT_FDCWD, to));
    return real(from, to);
}

int linkat(int from_dir, const char *from, int to_dir, const char *to, int flags) {
    REAL(int, "linkat", int, const char *, int, const char *, int);
    FAIL_IF(verdict_at(OP_RENAME, to_dir, to));
    return real(from_dir, from, to_dir, to, flags);
}

/* Opening a file that is there takes no space, so only a new one can fail. */
static int creates(int dirfd, const char *path, int flags) {
    return (flags & O_CREAT) && syscall(SYS_faccessat, dirfd, path, F_OK) != 0;
}

#define MODE_ARGUMENT(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { \
        va_list arguments; \
        va_start(arguments, flags); \
        mode = va_arg(arguments, mode_t); \
        va_end(arguments); \
    }

#define OPEN(function) \
    int function(const char *path, int flags, ...) { \
        MODE_ARGUMENT(flags) \
        REAL(int, #function, const char *, int, ...); \
        int saved = errno; \
        if (creates(AT_FDCWD, path, flags)) FAIL_IF(verdict_at(OP_CREATE, AT_FDCWD, path)); \
        errno = saved; \
        return real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(function) \
    int function(int dirfd, const char *path, int flags, ...) { \
        MODE_ARGUMENT(flags) \
        REAL(int, #function, int, const char *, int, ...); \
        int saved = errno; \
        if (creates(dirfd, path, flags)) FAIL_IF(verdict_at(OP_CREATE, dirfd, path)); \
        errno = saved; \
        return real(dirfd, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

int mkdir(const char *path, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t);
    int saved = errno;
    if (creates(AT_FDCWD, path, O_CREAT)) FAIL_IF(verdict_at(OP_CREATE, AT_FDCWD, path));
    errno = saved;
    return real(path, mode);
}
