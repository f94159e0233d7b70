//===- ForkServer.cpp - one start of a program for many runs, LD_PRELOAD --===//
//
// LibTorch registers thousands of operators before a program's main(), which
// takes longer than many a test's run. With FORK_SERVER=fd a program that has
// done so waits for requests on that socket (SOCK_SEQPACKET) and forks for each
// a process that calls main(): test/parity/fork_server.py.
//
// A request is a folder and arguments, each ended by NUL, with three file
// descriptors: stdout, stderr and a pipe, which gets the process's pid and, at
// its end, its status as waitpid() gives it. FORK_SERVER_LOAD names a library
// to load before.
//
//===----------------------------------------------------------------------===//
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <csignal>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {

using Main = int (*)(int, char **, char **);
Main programMain;

struct Request {
  std::vector<char> text;
  int files[3] = {-1, -1, -1};
};

[[noreturn]] void fail(const char *what) {
  std::perror(what);
  std::_Exit(1);
}

/// False when nobody can ask any more.
bool receive(int socket, Request &request) {
  request.text.resize(1 << 20);
  iovec piece = {request.text.data(), request.text.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(request.files))];
  msghdr message = {};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t size = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  if (size < 0)
    fail("recvmsg");
  if (size == 0)
    return false;
  request.text.resize(size_t(size));
  cmsghdr *header = CMSG_FIRSTHDR(&message);
  if (!header || header->cmsg_len != CMSG_LEN(sizeof(request.files)) ||
      request.text.back() != '\0' || (message.msg_flags & MSG_TRUNC))
    fail("expected a request");
  std::memcpy(request.files, CMSG_DATA(header), sizeof(request.files));
  return true;
}

int runMain(Request &request) {
  dup2(request.files[0], STDOUT_FILENO);
  dup2(request.files[1], STDERR_FILENO);
  for (int file : request.files)
    close(file);
  std::vector<char *> words;
  char *end = request.text.data() + request.text.size();
  for (char *word = request.text.data(); word != end;
       word += std::strlen(word) + 1)
    words.push_back(word);
  if (chdir(words[0]) != 0)
    fail("chdir");
  words.push_back(nullptr);
  return programMain(int(words.size()) - 2, words.data() + 1, environ);
}

void put(int pipe, int value) {
  if (write(pipe, &value, sizeof(value)) != sizeof(value))
    std::_Exit(1);
}

/// The process that is the parent of the program's.
int keep(Request &request) {
  std::signal(SIGCHLD, SIG_DFL);
  pid_t pid = fork();
  if (pid < 0)
    fail("fork");
  if (pid == 0)
    std::exit(runMain(request));
  close(request.files[0]);
  close(request.files[1]);
  put(request.files[2], pid);
  int status = 0;
  waitpid(pid, &status, 0);
  put(request.files[2], status);
  return 0;
}

int serve(int count, char **words, char **environment) {
  const char *given = std::getenv("FORK_SERVER");
  if (!given)
    return programMain(count, words, environment);
  int socket = std::atoi(given);
  fcntl(socket, F_SETFD, FD_CLOEXEC);
  if (const char *library = std::getenv("FORK_SERVER_LOAD"))
    if (!dlopen(library, RTLD_NOW | RTLD_LOCAL)) {
      std::fprintf(stderr, "%s\n", dlerror());
      return 1;
    }
  for (const char *name : {"FORK_SERVER", "FORK_SERVER_LOAD", "LD_PRELOAD"})
    unsetenv(name);
  std::signal(SIGCHLD, SIG_IGN); // lest the ended become zombies
  Request request;
  while (receive(socket, request)) {
    pid_t pid = fork();
    if (pid < 0)
      fail("fork");
    if (pid == 0) {
      close(socket);
      std::_Exit(keep(request));
    }
    for (int file : request.files)
      close(file);
  }
  return 0;
}

} // namespace

extern "C" __attribute__((visibility("default"))) int
__libc_start_main(Main main, int argc, char **argv, void (*init)(),
                  void (*fini)(), void (*loaderFini)(), void *stackEnd) {
  programMain = main;
  auto real = reinterpret_cast<decltype(&__libc_start_main)>(
      dlsym(RTLD_NEXT, "__libc_start_main"));
  return real(serve, argc, argv, init, fini, loaderFini, stackEnd);
}
