//===- CommandLine.h - what the runtime's programs read and print alike ---===//
#ifndef FSDP_TOOLS_COMMANDLINE_H
#define FSDP_TOOLS_COMMANDLINE_H

#include "fsdp/Support/Message.h"

#include <CLI/CLI.hpp>

#include <charconv>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>

namespace fsdp::runtime {

inline constexpr uint64_t kMaxCount = INT64_MAX;
inline constexpr uint64_t kMaxSeed = UINT64_MAX;

/// Prints the error in one line of `program`; returns the exit status.
inline int reportError(const char *program, const std::exception &error,
                       int status) {
  std::fprintf(stderr, "%s: error: %s\n", program,
               fsdp::oneLine(error.what()).c_str());
  return status;
}

/// A whole number within [low, high], in digits only: CLI11 would accept a
/// sign, and would take a number that is too large for another number.
inline CLI::Validator wholeNumber(uint64_t low, uint64_t high) {
  std::string expected = "expected a whole number from " + std::to_string(low) +
                         " to " + std::to_string(high);
  return {[=](const std::string &text) -> std::string {
            uint64_t value = 0;
            const char *end = text.data() + text.size();
            auto read = std::from_chars(text.data(), end, value);
            if (read.ptr == end && read.ec == std::errc() && value >= low &&
                value <= high)
              return {};
            return expected + ", got \"" + text.substr(0, 80) + "\"";
          },
          ""};
}

} // namespace fsdp::runtime

#endif // FSDP_TOOLS_COMMANDLINE_H
