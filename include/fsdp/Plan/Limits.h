//===- Limits.h - the most that a plan may ask for ------------------------===//
#ifndef FSDP_PLAN_LIMITS_H
#define FSDP_PLAN_LIMITS_H

#include <cstdint>

namespace fsdp::plan {

/// Ranks of a plan.
inline constexpr int64_t kMaxWorldSize = int64_t(1) << 20;
/// Microbatches of a step.
inline constexpr int64_t kMaxAccumulationSteps = int64_t(1) << 20;

} // namespace fsdp::plan

#endif // FSDP_PLAN_LIMITS_H
