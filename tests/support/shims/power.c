/* A journal of everything that one process and its children change under a directory, and of what they sync.
 *
 * SHIM_POWER_PREFIX   only this directory and what lies under it are written down
 * SHIM_POWER_JOURNAL  the file that the records are appended to, each in one write
 *
 * tests/support/power.py reads the records and rebuilds the disk as a power cut would leave it: a write counts once its
 * file was synced after it, a name once its directory was. A record is written after its call returned, so that nothing
 * counts as synced which a caller could not rely on yet.
 *
 * Record: the header below, then the path, then the second path or the data.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { CREATED = 'c', WROTE = 'w', CUT = 't', SYNCED = 's', DIR_SYNCED = 'S', RENAMED = 'r', REMOVED = 'u', DIR_MADE = 'd' };

struct header {
    uint64_t at_ns, inode, offset, kind;
    uint64_t path_bytes, data_bytes;
};

static int journal_fd = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int inside(const char *path) {
    const char *prefix = getenv("SHIM_POWER_PREFIX");
    if (prefix == NULL || strncmp(path, prefix, strlen(prefix)) != 0) return 0;
    return path[strlen(prefix)] == '/' || path[strlen(prefix)] == 0;
}

static void note(int kind, uint64_t inode, const char *path, uint64_t offset, const void *data, size_t count) {
    int saved = errno;
    const char *journal = getenv("SHIM_POWER_JOURNAL");
    struct timespec now;
    if (journal == NULL) return;
    pthread_mutex_lock(&lock);
    if (journal_fd < 0)
        journal_fd = (int)syscall(SYS_openat, AT_FDCWD, journal, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    pthread_mutex_unlock(&lock);
    clock_gettime(CLOCK_MONOTONIC, &now);
    struct header header = {
        (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec, inode, offset, (uint64_t)kind, strlen(path), count};
    struct iovec parts[3] = {{&header, sizeof header}, {(void *)path, strlen(path)}, {(void *)data, count}};
    if (syscall(SYS_writev, journal_fd, parts, 3) < 0) abort();
    errno = saved;
}

static int path_of_fd(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return inside(path);
}

static int path_at(int dirfd, const char *name, char *path) {
    char link[64];
    if (name == NULL) return 0;
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
        return inside(path);
    }
    if (dirfd == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
    else snprintf(link, sizeof link, "/proc/self/fd/%d", dirfd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    if (length <= 0) return 0;
    snprintf(path + length, PATH_MAX - (size_t)length, "/%s", name);
    return inside(path);
}

static uint64_t inode_of(int fd) {
    struct stat found;
    return fstat(fd, &found) == 0 ? (uint64_t)found.st_ino : 0;
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (real == NULL) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

/* ---- bytes */

static void wrote(int fd, off_t offset, const void *data, ssize_t count) {
    char path[PATH_MAX];
    if (count > 0 && path_of_fd(fd, path)) note(WROTE, inode_of(fd), path, (uint64_t)offset, data, (size_t)count);
}

ssize_t write(int fd, const void *data, size_t count) {
    REAL(ssize_t, "write", int, const void *, size_t);
    ssize_t done = real(fd, data, count);
    int saved = errno;
    if (done > 0) wrote(fd, (off_t)syscall(SYS_lseek, fd, 0, SEEK_CUR) - done, data, done);
    errno = saved;
    return done;
}

#define PWRITE(function) \
    ssize_t function(int fd, const void *data, size_t count, off_t offset) { \
        REAL(ssize_t, #function, int, const void *, size_t, off_t); \
        ssize_t done = real(fd, data, count, offset); \
        if (done > 0) wrote(fd, offset, data, done); \
        return done; \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

#define TRUNCATE(function) \
    int function(int fd, off_t size) { \
        REAL(int, #function, int, off_t); \
        int done = real(fd, size); \
        char path[PATH_MAX]; \
        if (done == 0 && path_of_fd(fd, path)) note(CUT, inode_of(fd), path, (uint64_t)size, "", 0); \
        return done; \
    }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

#define SYNC(function) \
    int function(int fd) { \
        REAL(int, #function, int); \
        int done = real(fd); \
        char path[PATH_MAX]; \
        struct stat found; \
        if (done == 0 && path_of_fd(fd, path) && fstat(fd, &found) == 0) \
            note(S_ISDIR(found.st_mode) ? DIR_SYNCED : SYNCED, (uint64_t)found.st_ino, path, 0, "", 0); \
        return done; \
    }
SYNC(fsync)
SYNC(fdatasync)

/* ---- names */

static int opened(int dirfd, const char *name, int flags, int existed, int fd) {
    char path[PATH_MAX];
    if (fd < 0 || !path_at(dirfd, name, path)) return fd;
    if ((flags & O_CREAT) && !existed) note(CREATED, inode_of(fd), path, 0, "", 0);
    else if (flags & O_TRUNC) note(CUT, inode_of(fd), path, 0, "", 0);
    return fd;
}

static int exists(int dirfd, const char *name) {
    return syscall(SYS_faccessat, dirfd, name, F_OK) == 0;
}

#define OPEN(function) \
    int function(const char *name, int flags, ...) { \
        REAL(int, #function, const char *, int, ...); \
        va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
        int existed = (flags & O_CREAT) ? exists(AT_FDCWD, name) : 1; \
        return opened(AT_FDCWD, name, flags, existed, real(name, flags, mode)); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(function) \
    int function(int dirfd, const char *name, int flags, ...) { \
        REAL(int, #function, int, const char *, int, ...); \
        va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
        int existed = (flags & O_CREAT) ? exists(dirfd, name) : 1; \
        return opened(dirfd, name, flags, existed, real(dirfd, name, flags, mode)); \
    }
OPENAT(openat)
OPENAT(openat64)

static void renamed(int from_fd, const char *from, int to_fd, const char *to) {
    char source[PATH_MAX], target[PATH_MAX];
    int leaves = path_at(from_fd, from, source), comes = path_at(to_fd, to, target);
    if (leaves || comes) note(RENAMED, 0, source, 0, target, strlen(target));
}

int rename(const char *from, const char *to) {
    REAL(int, "rename", const char *, const char *);
    int done = real(from, to);
    if (done == 0) renamed(AT_FDCWD, from, AT_FDCWD, to);
    return done;
}

int renameat(int from_fd, const char *from, int to_fd, const char *to) {
    REAL(int, "renameat", int, const char *, int, const char *);
    int done = real(from_fd, from, to_fd, to);
    if (done == 0) renamed(from_fd, from, to_fd, to);
    return done;
}

static void removed(int dirfd, const char *name) {
    char path[PATH_MAX];
    if (path_at(dirfd, name, path)) note(REMOVED, 0, path, 0, "", 0);
}

#define REMOVE(function) \
    int function(const char *name) { \
        REAL(int, #function, const char *); \
        int done = real(name); \
        if (done == 0) removed(AT_FDCWD, name); \
        return done; \
    }
REMOVE(unlink)
REMOVE(rmdir)

int unlinkat(int dirfd, const char *name, int flags) {
    REAL(int, "unlinkat", int, const char *, int);
    int done = real(dirfd, name, flags);
    if (done == 0) removed(dirfd, name);
    return done;
}

static void made(int dirfd, const char *name) {
    char path[PATH_MAX];
    if (path_at(dirfd, name, path)) note(DIR_MADE, 0, path, 0, "", 0);
}

int mkdir(const char *name, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t);
    int done = real(name, mode);
    if (done == 0) made(AT_FDCWD, name);
    return done;
}

int mkdirat(int dirfd, const char *name, mode_t mode) {
    REAL(int, "mkdirat", int, const char *, mode_t);
    int done = real(dirfd, name, mode);
    if (done == 0) made(dirfd, name);
    return done;
}
