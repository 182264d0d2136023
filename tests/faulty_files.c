/* Loaded before libc (LD_PRELOAD): makes a chosen operation on files the last one, or one that fails.

Operations that change something below one folder are counted. `fault_arm` says what happens at the one of a number:
the process gets a signal (a write that SIGKILL hits is done by half), or it and all later ones fail with an error, as on
a disk that is full or has become read-only. What C, C++, Rust and Python call is covered; mapped memory is not. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static char below[PATH_MAX];   /* the folder; empty: nothing is counted */
static atomic_long counted;    /* operations so far */
static long chosen;            /* the number of the one that is hit; 0: none */
static int signal_sent, error; /* what happens then: one of them is not 0 */
static int records = -1;       /* file descriptor to which operations are written */
static int records_all;        /* all of them, else the one that is hit */

enum { NEEDS_ROOM = 1, WRITES = 2 };

void fault_arm(const char *folder, long number, int signal_number, int error_number, int record_to, int all) {
    counted = 0;
    chosen = number, signal_sent = signal_number, error = error_number, records = record_to, records_all = all;
    snprintf(below, sizeof below, "%s", folder);
}

long fault_count(void) { return counted; }

static timer_t timer;
static int has_timer;

/* The kernel sends the signal once the process has computed for so long. */
int fault_after(double seconds, int signal_number) {
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = signal_number};
    struct itimerspec when = {.it_value = {(time_t)seconds, (long)(1e9 * (seconds - (time_t)seconds)) + 1}};
    if (timer_create(CLOCK_PROCESS_CPUTIME_ID, &event, &timer)) return -1;
    has_timer = 1;
    return timer_settime(timer, 0, &when, NULL);
}

void fault_disarm(void) {
    below[0] = 0;
    if (has_timer) timer_delete(timer);
    has_timer = 0;
}

static int is_below(const char *path) {
    size_t length = strlen(below);
    return length && !strncmp(path, below, length) && (path[length] == '/' || !path[length]);
}

static void absolute(int folder, const char *path, char *result) {
    char link[64], base[PATH_MAX];
    if (path[0] == '/') {
        snprintf(result, PATH_MAX, "%s", path);
        return;
    }
    if (folder == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) base[0] = 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(link, base, sizeof base - 1);
        base[length < 0 ? 0 : length] = 0;
    }
    if (snprintf(result, PATH_MAX, "%s%s%s", base, path[0] ? "/" : "", path) >= PATH_MAX) result[0] = 0;
}

static long (*libc_write)(int, const void *, size_t);

/* Counts an operation. Returns 0 where it is to be done; -1 where it fails, with errno; 1: by half, then SIGKILL. */
static int hit(const char *name, int folder, const char *path, int kind) {
    char full[PATH_MAX], line[PATH_MAX + 64];
    int before = errno;
    if (!below[0]) return 0;
    absolute(folder, path, full);
    errno = before;
    if (!is_below(full)) return 0;
    long number = ++counted;
    if (records >= 0 && (records_all || number == chosen)) {
        int length = snprintf(line, sizeof line, "%ld\t%s\t%s\n", number, name, full);
        if (length < (int)sizeof line) libc_write(records, line, length);
        errno = before;
    }
    if (!chosen || number < chosen) return 0;
    if (error) {
        if (error == ENOSPC && !(kind & NEEDS_ROOM)) return 0;
        errno = error;
        return number == chosen && error == ENOSPC && (kind & WRITES) ? 2 : -1;
    }
    if (number > chosen) return 0;
    if (signal_sent == SIGKILL && (kind & WRITES)) return 1;
    kill(getpid(), signal_sent);
    return 0;
}

static int hit_file(const char *name, int file, int kind) { return hit(name, file, "", kind); }

__attribute__((constructor)) static void find_write(void) { libc_write = dlsym(RTLD_NEXT, "write"); }

#define LIBC(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* A write: of the one that is hit the first half is done. */
#define WRITE(result, name, parameters, whole, half, size) \
    result name parameters { \
        LIBC(name); \
        int what = hit_file(#name, file, NEEDS_ROOM | WRITES); \
        if (what < 0) return -1; \
        if (what > 0) { \
            result done = size > 1 ? half : -1; \
            if (what == 1) kill(getpid(), SIGKILL); \
            if (done < 0) errno = error; \
            return done; \
        } \
        return whole; \
    }

WRITE(ssize_t, write, (int file, const void *from, size_t size), real(file, from, size), real(file, from, size / 2), size)
WRITE(ssize_t, pwrite, (int file, const void *from, size_t size, off_t at), real(file, from, size, at),
      real(file, from, size / 2, at), size)
WRITE(ssize_t, pwrite64, (int file, const void *from, size_t size, off64_t at), real(file, from, size, at),
      real(file, from, size / 2, at), size)
WRITE(ssize_t, writev, (int file, const struct iovec *parts, int n), real(file, parts, n), real(file, parts, n / 2), n)
WRITE(ssize_t, sendfile, (int file, int source, off_t *at, size_t size), real(file, source, at, size),
      real(file, source, at, size / 2), size)
WRITE(ssize_t, sendfile64, (int file, int source, off64_t *at, size_t size), real(file, source, at, size),
      real(file, source, at, size / 2), size)
ssize_t copy_file_range(int source, off64_t *from, int file, off64_t *at, size_t size, unsigned flags) {
    LIBC(copy_file_range);
    int what = hit_file("copy_file_range", file, NEEDS_ROOM | WRITES);
    if (what < 0) return -1;
    if (what > 0) {
        ssize_t done = real(source, from, file, at, size / 2, flags);
        if (what == 1) kill(getpid(), SIGKILL);
        return done;
    }
    return real(source, from, file, at, size, flags);
}

/* Anything else: done or not. */
#define CHANGE(name, parameters, arguments, folder, path, kind) \
    int name parameters { \
        LIBC(name); \
        int what = hit(#name, folder, path, kind); \
        return what < 0 ? -1 : real arguments; \
    }

CHANGE(rename, (const char *from, const char *to), (from, to), AT_FDCWD, to, 0)
CHANGE(renameat, (int a, const char *from, int b, const char *to), (a, from, b, to), b, to, 0)
CHANGE(renameat2, (int a, const char *from, int b, const char *to, unsigned flags), (a, from, b, to, flags), b, to, 0)
CHANGE(link, (const char *from, const char *to), (from, to), AT_FDCWD, to, NEEDS_ROOM)
CHANGE(linkat, (int a, const char *from, int b, const char *to, int flags), (a, from, b, to, flags), b, to, NEEDS_ROOM)
CHANGE(symlink, (const char *from, const char *to), (from, to), AT_FDCWD, to, NEEDS_ROOM)
CHANGE(unlink, (const char *path), (path), AT_FDCWD, path, 0)
CHANGE(unlinkat, (int folder, const char *path, int flags), (folder, path, flags), folder, path, 0)
CHANGE(rmdir, (const char *path), (path), AT_FDCWD, path, 0)
CHANGE(remove, (const char *path), (path), AT_FDCWD, path, 0)
CHANGE(mkdir, (const char *path, mode_t mode), (path, mode), AT_FDCWD, path, NEEDS_ROOM)
CHANGE(mkdirat, (int folder, const char *path, mode_t mode), (folder, path, mode), folder, path, NEEDS_ROOM)
CHANGE(chmod, (const char *path, mode_t mode), (path, mode), AT_FDCWD, path, 0)
CHANGE(truncate, (const char *path, off_t size), (path, size), AT_FDCWD, path, 0)
CHANGE(truncate64, (const char *path, off64_t size), (path, size), AT_FDCWD, path, 0)
CHANGE(ftruncate, (int file, off_t size), (file, size), file, "", 0)
CHANGE(ftruncate64, (int file, off64_t size), (file, size), file, "", 0)
CHANGE(fsync, (int file), (file), file, "", NEEDS_ROOM)
CHANGE(fdatasync, (int file), (file), file, "", NEEDS_ROOM)

int posix_fallocate(int file, off_t at, off_t size) {
    LIBC(posix_fallocate);
    return hit_file("posix_fallocate", file, NEEDS_ROOM) < 0 ? error : real(file, at, size);
}

/* Opening counts where the file may change; room is needed for a new one. */
static int hit_open(const char *name, int folder, const char *path, int flags) {
    char full[PATH_MAX];
    int before = errno, changes = flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR);
    if (!below[0] || !changes) return 0;
    absolute(folder, path, full);
    int is_new = (flags & O_CREAT) && access(full, F_OK);
    errno = before;
    return hit(name, folder, path, is_new ? NEEDS_ROOM : 0);
}

#define OPEN(name, parameters, folder, ...) \
    int name parameters { \
        LIBC(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        return hit_open(#name, folder, path, flags) < 0 ? -1 : real(__VA_ARGS__, flags, mode); \
    }

OPEN(open, (const char *path, int flags, ...), AT_FDCWD, path)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, path)
OPEN(openat, (int folder, const char *path, int flags, ...), folder, folder, path)
OPEN(openat64, (int folder, const char *path, int flags, ...), folder, folder, path)

#define FOPEN(name) \
    FILE *name(const char *path, const char *mode) { \
        LIBC(name); \
        int flags = strpbrk(mode, "wa") ? O_CREAT | O_WRONLY : strchr(mode, '+') ? O_RDWR : 0; \
        return hit_open(#name, AT_FDCWD, path, flags) < 0 ? NULL : real(path, mode); \
    }

FOPEN(fopen)
FOPEN(fopen64)
