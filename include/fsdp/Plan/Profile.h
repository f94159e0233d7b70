//===- Profile.h - measured seconds of a plan's instructions --------------===//
//
// What `fsdp-run --profile` writes and the cost model reads: JSON of its own,
// next to a plan. Uses the standard library only, as Plan.h does.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_PLAN_PROFILE_H
#define FSDP_PLAN_PROFILE_H

#include "fsdp/Plan/Plan.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::plan {

inline constexpr int64_t kProfileFormat = 1;

struct Profile {
  /// What was run, and how many seconds one run takes.
  struct Entry {
    std::string what; ///< signature()
    double seconds = 0;
  };

  /// Of the plan that was run: "xxh3:" and 32 hex digits of XXH3-128 over its
  /// file.
  std::string planHash;
  int64_t worldSize = 1;
  /// Steps that the numbers are medians over.
  int64_t steps = 1;
  /// What the median step takes beyond the instructions' medians: reading the
  /// batch, the loss, statistics, and what delays some instruction in every
  /// step.
  double outsideSeconds = 0;
  /// In the order of Plan::instructions.
  std::vector<Entry> instructions;
  /// Bytes beyond the arena that operators allocated for themselves, on the
  /// rank with the most; nullopt: not measured.
  std::optional<int64_t> scratchBytes = std::nullopt;
};

/// What an instruction does, without the numbers of values: the operator with
/// the dtypes and shapes of its tensors, or a collective with its bytes. Two
/// instructions with the same signature take about the same time.
std::string signature(const Plan &plan, const Instruction &instruction);

/// Throws a PlanError that names `origin`, the JSON path and what was expected.
Profile parseProfile(std::string_view json, const std::string &origin);
/// Reads a file. Throws PlanError.
Profile readProfile(const std::string &path);
/// The JSON form, one line per instruction.
std::string printProfile(const Profile &profile);

} // namespace fsdp::plan

#endif // FSDP_PLAN_PROFILE_H
