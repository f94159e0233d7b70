//===- Requests.cpp - one fsdp-opt for many runs --------------------------===//
//
// To load LibTorch takes five times as long as to compile a small step.
//
//===----------------------------------------------------------------------===//
#include "Requests.h"

#include "fsdp/Import/Capture.h"
#include "llvm/ADT/SmallVector.h"
#include "llvm/Support/CommandLine.h"
#include "llvm/Support/StringSaver.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <optional>
#include <poll.h>
#include <string>
#include <sys/wait.h>
#include <unistd.h>

using namespace mlir;

constexpr llvm::StringLiteral kRequests = "--requests";
constexpr int kIdleMilliseconds = 60 * 1000;

bool mlir::fsdp::asksForRequests(int argc, char **argv) {
  return argc == 2 && argv[1] == kRequests;
}

/// The next request without its end; nothing at the end of the input, or when
/// it has not begun for kIdleMilliseconds. `read` is what was read beyond it.
static std::optional<std::string> nextRequest(std::string &read) {
  for (;;) {
    if (size_t end = read.find('\0'); end != std::string::npos) {
      std::string text = read.substr(0, end);
      read.erase(0, end + 1);
      return text;
    }
    pollfd input{STDIN_FILENO, POLLIN, 0};
    int ready = poll(&input, 1, kIdleMilliseconds);
    if (ready < 0 && errno == EINTR)
      continue;
    char buffer[4096];
    ssize_t count =
        ready > 0 ? ::read(STDIN_FILENO, buffer, sizeof(buffer)) : 0;
    if (count < 0 && errno == EINTR)
      continue;
    if (count <= 0)
      return std::nullopt;
    read.append(buffer, size_t(count));
  }
}

/// In the process of a run; its errors go to `errors`.
[[noreturn]] static void runRequest(llvm::StringRef program,
                                    llvm::StringRef request, int errors,
                                    llvm::function_ref<int(int, char **)> run) {
  int null = open("/dev/null", O_RDWR);
  for (auto [from, to] :
       {std::pair(null, STDIN_FILENO), std::pair(null, STDOUT_FILENO),
        std::pair(errors, STDERR_FILENO)})
    if (dup2(from, to) < 0)
      std::_Exit(EXIT_FAILURE);
  llvm::BumpPtrAllocator allocator;
  llvm::StringSaver saver(allocator);
  llvm::SmallVector<const char *> arguments{saver.save(program).data()};
  llvm::cl::TokenizeGNUCommandLine(request, saver, arguments);
  auto argc = int(arguments.size());
  arguments.push_back(nullptr);
  std::_Exit(run(argc, const_cast<char **>(arguments.data())));
}

/// What a run writes until it ends, and its status.
static std::pair<int, std::string>
answer(llvm::StringRef program, llvm::StringRef request,
       llvm::function_ref<int(int, char **)> run) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0)
    return {EXIT_FAILURE, (program + ": error: no pipe\n").str()};
  pid_t child = fork();
  if (child == 0)
    runRequest(program, request, ends[1], run);
  close(ends[1]);
  std::string text;
  char buffer[4096];
  for (ssize_t count; (count = ::read(ends[0], buffer, sizeof(buffer))) != 0;)
    if (count > 0)
      text.append(buffer, size_t(count));
    else if (errno != EINTR)
      break;
  close(ends[0]);
  if (child < 0)
    return {EXIT_FAILURE, (program + ": error: no process\n").str()};
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR)
    ;
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
          text};
}

int mlir::fsdp::serveRequests(llvm::StringRef program,
                              llvm::function_ref<int(int, char **)> run) {
  try {
    ::fsdp::loadCaptureReader();
  } catch (const ::fsdp::CaptureError &) {
    // Each run that needs it says so.
  }
  std::string read;
  while (std::optional<std::string> request = nextRequest(read)) {
    auto [status, text] = answer(program, *request, run);
    std::printf("%d %zu\n", status, text.size());
    std::fwrite(text.data(), 1, text.size(), stdout);
    if (std::fflush(stdout) != 0)
      return EXIT_FAILURE; // nobody reads it
  }
  return EXIT_SUCCESS;
}
