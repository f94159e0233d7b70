//===- Digest.h - what tells that a plan is the one that was written ------===//
#ifndef FSDP_PLAN_DIGEST_H
#define FSDP_PLAN_DIGEST_H

#include "fsdp/Plan/Plan.h"

namespace fsdp::plan {

/// The hash of the JSON form up to its key `digest`, which contains this hash.
/// Throws PlanError for a name that is not UTF-8, as printPlan() does.
std::string digestOf(const Plan &plan);

/// KernelCode::hash: that of a kernel without its codes, with `code` but for
/// its hash. So code runs only for the calls that it was made from.
std::string hashOf(const Kernel &kernel, const KernelCode &code);

} // namespace fsdp::plan

#endif // FSDP_PLAN_DIGEST_H
