//===- Fuzz.h - what fuzz targets and their driver share ------------------===//
//
// A target is one file with LLVMFuzzerTestOneInput, as libFuzzer wants it.
// Built without -fsanitize=fuzzer it gets the main() of Driver.cpp.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_UNITTESTS_FUZZ_FUZZ_H
#define FSDP_UNITTESTS_FUZZ_FUZZ_H

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <vector>

/// Reads one input. It may refuse it; it must not crash, hang, or break what
/// its file says of inputs that it accepts.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/// A target with a container's form (a length, an archive) has one of its own:
/// changes `data` in place within `maxSize` and returns the new size.
extern "C" __attribute__((weak)) size_t LLVMFuzzerCustomMutator(uint8_t *data,
                                                                size_t size,
                                                                size_t maxSize,
                                                                unsigned seed);

namespace fsdp::fuzz {

/// Choices that follow from one seed, on every platform the same.
class Random {
public:
  explicit Random(uint64_t seed) : engine(seed) {}
  /// Below `end`, which is positive.
  size_t below(size_t end) { return size_t(engine() % end); }
  bool oneIn(size_t n) { return below(n) == 0; }

private:
  std::mt19937_64 engine;
};

/// Flips, replaces, inserts, removes or repeats a few bytes.
std::string mutateBytes(std::string text, Random &random);

/// Changes a text in its tokens (names, numbers, strings, brackets) or lines:
/// removes, repeats, exchanges them, puts extreme numbers, takes a bracketed
/// part away or from `donor`, nests deeply.
std::string mutateText(std::string text, std::string_view donor,
                       Random &random);

/// Ends the process with a message if `holds` is false: the target has found a
/// fault that is no crash by itself.
void require(bool holds, std::string_view what);

/// A message of an error as it has to be: one that names `origin` first.
void requireMessage(std::string_view message, std::string_view origin);

/// A file in memory with the input, for readers that take a path.
class InputFile {
public:
  explicit InputFile(std::string_view bytes);
  ~InputFile();
  InputFile(const InputFile &) = delete;
  InputFile &operator=(const InputFile &) = delete;

  const std::string &path() const { return name; }

private:
  int descriptor;
  std::string name;
};

} // namespace fsdp::fuzz

#endif // FSDP_UNITTESTS_FUZZ_FUZZ_H
