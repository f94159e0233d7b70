//===- Driver.cpp - a bounded, seeded run of a fuzz target ----------------===//
//
//   fuzz-TARGET [--seed N] [--runs N] [--split TEXT] FILE-OR-FOLDER...
//
// Gives the target every file as it is, or its parts between lines TEXT, then
// `runs` inputs made of them. The same seed makes the same inputs. Where the
// target crashes, uses more than kSeconds of processor time or more than
// kMemory for one input, the input is left in fuzz-TARGET.input and the exit
// status is not 0.
//
//===----------------------------------------------------------------------===//
#include "Fuzz.h"
#include "Support/Sanitizers.h"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <unistd.h>

#ifdef FSDP_ADDRESS_SANITIZER
#include <sanitizer/common_interface_defs.h>
#endif

namespace fs = std::filesystem;
using namespace fsdp::fuzz;

namespace {

constexpr int kSeconds = 20;
constexpr size_t kMaxInput = size_t(1) << 20;

/// What the handlers need; they may only do what a signal handler may.
std::string name;
std::string inputPath;
const std::string *current = nullptr;
unsigned long long seed = 1, run = 0;

void leaveInput() {
  if (!current)
    return;
  char text[256];
  int length =
      std::snprintf(text, sizeof(text), "%s: seed %llu, run %llu: see %s\n",
                    name.c_str(), seed, run, inputPath.c_str());
  int file = open(inputPath.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  bool ok = write(file, current->data(), current->size()) >= 0;
  close(file);
  if (!ok || write(STDERR_FILENO, text, size_t(length)) < 0)
    _exit(2);
}

void onSignal(int signal) {
  if (signal == SIGVTALRM) {
    constexpr char text[] = "fuzz: an input takes too long\n";
    if (write(STDERR_FILENO, text, sizeof(text) - 1) < 0)
      _exit(2);
  }
  leaveInput();
  std::signal(signal, SIG_DFL);
  raise(signal);
}

void catchFaults() {
#ifdef FSDP_ADDRESS_SANITIZER
  __sanitizer_set_death_callback(leaveInput);
  constexpr int signals[] = {SIGABRT, SIGVTALRM};
#else
  constexpr rlim_t limit = rlim_t(6) << 30;
  rlimit memory{limit, limit};
  setrlimit(RLIMIT_AS, &memory);
  constexpr int signals[] = {SIGSEGV, SIGBUS,  SIGFPE,
                             SIGILL,  SIGABRT, SIGVTALRM};
#endif
  // A stack that has overflowed is of no use to a handler.
  static char stack[1 << 16];
  stack_t other{};
  other.ss_sp = stack;
  other.ss_size = sizeof(stack);
  sigaltstack(&other, nullptr);
  for (int signal : signals) {
    struct sigaction action{};
    action.sa_handler = onSignal;
    action.sa_flags = SA_ONSTACK;
    sigaction(signal, &action, nullptr);
  }
}

void give(const std::string &input) {
  current = &input;
  itimerval limit{{0, 0}, {kSeconds, 0}};
  setitimer(ITIMER_VIRTUAL, &limit, nullptr);
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t *>(input.data()),
                         input.size());
  current = nullptr;
}

/// The parts of `text` between occurrences of `separator`.
std::vector<std::string> split(const std::string &text,
                               const std::string &separator) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin != std::string::npos;) {
    size_t end =
        separator.empty() ? std::string::npos : text.find(separator, begin);
    parts.push_back(text.substr(begin, end - begin));
    begin = end == std::string::npos ? end : end + separator.size();
  }
  return parts;
}

std::vector<std::string> readCorpus(const std::vector<fs::path> &paths,
                                    const std::string &separator) {
  std::vector<fs::path> files;
  for (const fs::path &path : paths) {
    if (!fs::is_directory(path)) {
      files.push_back(path);
      continue;
    }
    for (const auto &entry : fs::recursive_directory_iterator(path))
      if (entry.is_regular_file())
        files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  std::vector<std::string> corpus;
  for (const fs::path &path : files) {
    std::ifstream file(path, std::ios::binary);
    std::string text{std::istreambuf_iterator<char>(file),
                     std::istreambuf_iterator<char>()};
    if (!file || text.size() > kMaxInput) {
      std::fprintf(stderr, "%s: %s: expected a file of at most %zu bytes\n",
                   name.c_str(), path.c_str(), kMaxInput);
      std::exit(2);
    }
    for (std::string &part : split(text, separator))
      corpus.push_back(std::move(part));
  }
  return corpus;
}

std::string mutate(const std::vector<std::string> &corpus, Random &random) {
  std::string input = corpus[random.below(corpus.size())];
  if (random.oneIn(3))
    return mutateBytes(std::move(input), random);
  if (!LLVMFuzzerCustomMutator)
    return mutateText(std::move(input), corpus[random.below(corpus.size())],
                      random);
  size_t size = input.size();
  input.resize(kMaxInput);
  input.resize(
      LLVMFuzzerCustomMutator(reinterpret_cast<uint8_t *>(input.data()), size,
                              kMaxInput, unsigned(random.below(1u << 31))));
  return input;
}

} // namespace

int main(int argc, char **argv) {
  name = fs::path(argv[0]).filename();
  inputPath = fs::absolute(name + ".input");
  unsigned long long runs = 0;
  std::string separator;
  std::vector<fs::path> paths;
  for (int i = 1; i < argc; ++i) {
    bool hasValue = i + 1 < argc;
    if (hasValue && std::strcmp(argv[i], "--seed") == 0)
      seed = std::strtoull(argv[++i], nullptr, 10);
    else if (hasValue && std::strcmp(argv[i], "--runs") == 0)
      runs = std::strtoull(argv[++i], nullptr, 10);
    else if (hasValue && std::strcmp(argv[i], "--split") == 0)
      separator = argv[++i];
    else
      paths.emplace_back(argv[i]);
  }
  if (const char *given = std::getenv("FSDP_FUZZ_SEED"))
    seed = std::strtoull(given, nullptr, 10);
  std::printf("%s: seed %llu, %llu runs\n", name.c_str(), seed, runs);
  std::fflush(stdout);
  std::vector<std::string> corpus = readCorpus(paths, separator);
  if (corpus.empty()) {
    std::fprintf(stderr, "%s: expected files or folders\n", name.c_str());
    return 2;
  }
  catchFaults();
  for (const std::string &input : corpus)
    give(input);
  for (run = 1; run <= runs; ++run) {
    Random random(seed * 1000003 + run);
    give(mutate(corpus, random));
  }
}
