/* Counts the calls that change files below one folder, and makes one of them fail.
 *
 * Load it with LD_PRELOAD. These environment variables configure it:
 *
 *   FAULTS_ROOT    the folder, an absolute path without links; calls should not name
 *                  files by ".."
 *   FAULTS_KILL    N: the process dies by SIGKILL in the N-th call; if it writes, half of
 *                  its bytes are written, otherwise nothing is done
 *   FAULTS_BYTES   N: once N bytes are written, writes and new files fail with ENOSPC
 *   FAULTS_SWITCH  a path outside of the folder; while a file is there, calls fail with
 *                  EROFS
 *   FAULTS_LOG     a path outside of the folder; each call appends a line to that file
 *
 * Calls that libc makes itself, as fwrite does, are not seen. A trace of the training
 * program by strace showed none of them.
 *
 * A forked child that called faults_restart(root, kill) counts from 1 again.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[4096];
static const char *switch_path, *log_path;
static long kill_at, budget = -1;
static atomic_long calls, written;

__attribute__((constructor)) static void configure(void) {
  const char *value;
  if ((value = getenv("FAULTS_ROOT"))) snprintf(root, sizeof root, "%s", value);
  if ((value = getenv("FAULTS_KILL"))) kill_at = atol(value);
  if ((value = getenv("FAULTS_BYTES"))) budget = atol(value);
  switch_path = getenv("FAULTS_SWITCH");
  log_path = getenv("FAULTS_LOG");
}

void faults_restart(const char *folder, long kill) {
  snprintf(root, sizeof root, "%s", folder);
  kill_at = kill;
  calls = 0;
}

long faults_calls(void) { return calls; }

static int below_root(const char *path) {
  size_t length = strlen(root);
  return length && !strncmp(path, root, length) &&
         (path[length] == '/' || path[length] == '\0');
}

/* Finds the path of an open file as it is now; deleted files keep their old path. */
static int path_of(int fd, char *path, size_t size) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, size - 1);
  path[length > 0 ? length : 0] = '\0';
  return length > 0;
}

static int touches(int folder, const char *name) {
  char path[8192], start[4096] = "";
  if (!name) return 0;
  if (name[0] == '/') return below_root(name);
  if (folder == AT_FDCWD) {
    if (!getcwd(start, sizeof start)) return 0;
  } else if (!path_of(folder, start, sizeof start)) {
    return 0;
  }
  snprintf(path, sizeof path, "%s/%s", start, name);
  return below_root(path);
}

static int touches_fd(int fd) {
  char path[4096];
  return path_of(fd, path, sizeof path) && below_root(path);
}

static void note(long number, const char *name, size_t bytes) {
  char line[128];
  int length = snprintf(line, sizeof line, "%ld %s %zu\n", number, name, bytes);
  int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC;
  int fd = syscall(SYS_openat, AT_FDCWD, log_path, flags, 0644);
  if (fd >= 0) {
    syscall(SYS_write, fd, line, length);
    syscall(SYS_close, fd);
  }
}

/* Counts a call. Returns 0 to let it through, 1 to die in it, or an errno. */
static int enter(const char *name, size_t bytes, int takes_space) {
  int saved = errno;
  long number = atomic_fetch_add(&calls, 1) + 1;
  if (log_path) note(number, name, bytes);
  int fault = 0;
  if (switch_path && !syscall(SYS_faccessat, AT_FDCWD, switch_path, F_OK)) fault = EROFS;
  if (takes_space && budget >= 0 && atomic_load(&written) >= budget) fault = ENOSPC;
  if (kill_at == number) fault = -1;
  errno = saved;
  return fault;
}

static void die(void) {
  syscall(SYS_kill, getpid(), SIGKILL);
  for (;;) pause();
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* A call that writes nothing: it is let through, fails, or ends the process. */
#define GUARD(touched, name, takes_space)          \
  if (touched) {                                   \
    int fault = enter(name, 0, takes_space);       \
    if (fault < 0) die();                          \
    if (fault > 0) {                               \
      errno = fault;                               \
      return -1;                                   \
    }                                              \
  }

/* Returns how many of `bytes` may be written, 0 with errno set for none. */
static size_t allowed(const char *name, size_t bytes, int *dying) {
  int fault = enter(name, bytes, bytes > 0);
  *dying = fault < 0;
  if (*dying) return bytes / 2;
  if (fault > 0) {
    errno = fault;
    return 0;
  }
  if (budget < 0) return bytes;
  long left = budget - atomic_fetch_add(&written, (long)bytes);
  if (left <= 0) {
    errno = ENOSPC;
    return 0;
  }
  return (size_t)left < bytes ? (size_t)left : bytes;
}

/* A call that writes `bytes`; `call` may do with `part` of them. */
#define WRITE(fd, name, bytes, whole, call)                       \
  size_t part = bytes;                                            \
  if (!part || !touches_fd(fd)) return whole;                     \
  int dying;                                                      \
  part = allowed(name, part, &dying);                             \
  if (dying) {                                                    \
    if (part) (void)!(call);                                      \
    die();                                                        \
  }                                                               \
  if (!part) return -1;                                           \
  return call;

ssize_t write(int fd, const void *data, size_t size) {
  __typeof__(&write) next = NEXT(write);
  WRITE(fd, "write", size, next(fd, data, size), next(fd, data, part))
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
  __typeof__(&pwrite) next = NEXT(pwrite);
  WRITE(fd, "pwrite", size, next(fd, data, size, at), next(fd, data, part, at))
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
  __typeof__(&pwrite64) next = NEXT(pwrite64);
  WRITE(fd, "pwrite", size, next(fd, data, size, at), next(fd, data, part, at))
}

static size_t total(const struct iovec *pieces, int count) {
  size_t bytes = 0;
  for (int i = 0; i < count; i++) bytes += pieces[i].iov_len;
  return bytes;
}

/* Writes the first `part` bytes of the pieces, at the file's position if `at` < 0. */
static ssize_t write_part(int fd, const struct iovec *pieces, int count, size_t part,
                          off_t at) {
  __typeof__(&write) next = NEXT(write);
  __typeof__(&pwrite) next_at = NEXT(pwrite);
  size_t done = 0;
  for (int i = 0; i < count && done < part; i++) {
    size_t left = part - done, size = pieces[i].iov_len;
    size = size < left ? size : left;
    ssize_t found = at < 0 ? next(fd, pieces[i].iov_base, size)
                           : next_at(fd, pieces[i].iov_base, size, at + (off_t)done);
    if (found < 0) return done ? (ssize_t)done : -1;
    done += (size_t)found;
  }
  return (ssize_t)done;
}

ssize_t writev(int fd, const struct iovec *pieces, int count) {
  __typeof__(&writev) next = NEXT(writev);
  size_t all = total(pieces, count);
  WRITE(fd, "writev", all, next(fd, pieces, count),
        part == all ? next(fd, pieces, count) : write_part(fd, pieces, count, part, -1))
}

ssize_t pwritev(int fd, const struct iovec *pieces, int count, off_t at) {
  __typeof__(&pwritev) next = NEXT(pwritev);
  size_t all = total(pieces, count);
  WRITE(fd, "pwritev", all, next(fd, pieces, count, at),
        part == all ? next(fd, pieces, count, at)
                    : write_part(fd, pieces, count, part, at))
}

ssize_t pwritev64(int fd, const struct iovec *pieces, int count, off64_t at) {
  return pwritev(fd, pieces, count, at);
}

/* Returns how many of `size` bytes there are in a file from a position on. */
static size_t available(int fd, off64_t *at, size_t size) {
  struct stat found;
  off64_t start = at ? *at : lseek64(fd, 0, SEEK_CUR);
  if (fstat(fd, &found) || start < 0) return size;
  off64_t left = found.st_size > start ? found.st_size - start : 0;
  return (size_t)left < size ? (size_t)left : size;
}

ssize_t sendfile(int out, int in, off_t *at, size_t size) {
  __typeof__(&sendfile) next = NEXT(sendfile);
  size = available(in, at, size);
  WRITE(out, "sendfile", size, next(out, in, at, size), next(out, in, at, part))
}

ssize_t sendfile64(int out, int in, off64_t *at, size_t size) {
  return sendfile(out, in, at, size);
}

ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size,
                        unsigned flags) {
  __typeof__(&copy_file_range) next = NEXT(copy_file_range);
  size = available(in, from, size);
  WRITE(out, "copy_file_range", size, next(in, from, out, to, size, flags),
        next(in, from, out, to, part, flags))
}

/* Opening counts if it may create or change a file; only new or emptied files count as
 * space. */
#define CHANGES(flags) ((flags) & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR))
#define MODE(flags, last)                         \
  mode_t mode = 0;                                \
  if ((flags) & (O_CREAT | __O_TMPFILE)) {        \
    va_list rest;                                 \
    va_start(rest, last);                         \
    mode = va_arg(rest, mode_t);                  \
    va_end(rest);                                 \
  }

#define OPEN(function)                                                          \
  int function(const char *path, int flags, ...) {                              \
    MODE(flags, flags)                                                          \
    GUARD(CHANGES(flags) && touches(AT_FDCWD, path), "open", flags & O_CREAT)   \
    return NEXT(function)(path, flags, mode);                                   \
  }

#define OPENAT(function)                                                        \
  int function(int folder, const char *path, int flags, ...) {                  \
    MODE(flags, flags)                                                          \
    GUARD(CHANGES(flags) && touches(folder, path), "openat", flags & O_CREAT)   \
    return NEXT(function)(folder, path, flags, mode);                           \
  }

#define CREAT(function)                                                         \
  int function(const char *path, mode_t mode) {                                 \
    GUARD(touches(AT_FDCWD, path), "creat", 1)                                  \
    return NEXT(function)(path, mode);                                          \
  }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
CREAT(creat)
CREAT(creat64)

int rename(const char *from, const char *to) {
  GUARD(touches(AT_FDCWD, from) || touches(AT_FDCWD, to), "rename", 0)
  return NEXT(rename)(from, to);
}

int renameat(int from_folder, const char *from, int to_folder, const char *to) {
  GUARD(touches(from_folder, from) || touches(to_folder, to), "renameat", 0)
  return NEXT(renameat)(from_folder, from, to_folder, to);
}

int renameat2(int from_folder, const char *from, int to_folder, const char *to,
              unsigned flags) {
  GUARD(touches(from_folder, from) || touches(to_folder, to), "renameat2", 0)
  return NEXT(renameat2)(from_folder, from, to_folder, to, flags);
}

int link(const char *from, const char *to) {
  GUARD(touches(AT_FDCWD, to), "link", 1)
  return NEXT(link)(from, to);
}

int linkat(int from_folder, const char *from, int to_folder, const char *to, int flags) {
  GUARD(touches(to_folder, to), "linkat", 1)
  return NEXT(linkat)(from_folder, from, to_folder, to, flags);
}

int symlink(const char *target, const char *path) {
  GUARD(touches(AT_FDCWD, path), "symlink", 1)
  return NEXT(symlink)(target, path);
}

int unlink(const char *path) {
  GUARD(touches(AT_FDCWD, path), "unlink", 0)
  return NEXT(unlink)(path);
}

int unlinkat(int folder, const char *path, int flags) {
  GUARD(touches(folder, path), "unlinkat", 0)
  return NEXT(unlinkat)(folder, path, flags);
}

int remove(const char *path) {
  GUARD(touches(AT_FDCWD, path), "remove", 0)
  return NEXT(remove)(path);
}

int mkdir(const char *path, mode_t mode) {
  GUARD(touches(AT_FDCWD, path), "mkdir", 1)
  return NEXT(mkdir)(path, mode);
}

int mkdirat(int folder, const char *path, mode_t mode) {
  GUARD(touches(folder, path), "mkdirat", 1)
  return NEXT(mkdirat)(folder, path, mode);
}

int rmdir(const char *path) {
  GUARD(touches(AT_FDCWD, path), "rmdir", 0)
  return NEXT(rmdir)(path);
}

int fsync(int fd) {
  GUARD(touches_fd(fd), "fsync", 0)
  return NEXT(fsync)(fd);
}

int fdatasync(int fd) {
  GUARD(touches_fd(fd), "fdatasync", 0)
  return NEXT(fdatasync)(fd);
}

int ftruncate(int fd, off_t size) {
  GUARD(touches_fd(fd), "ftruncate", 0)
  return NEXT(ftruncate)(fd, size);
}

int ftruncate64(int fd, off64_t size) {
  GUARD(touches_fd(fd), "ftruncate", 0)
  return NEXT(ftruncate64)(fd, size);
}
