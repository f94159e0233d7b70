//===- Fusion.h - chains of operators as one kernel -----------------------===//
#ifndef FSDP_LIB_SIMULATE_FUSION_H
#define FSDP_LIB_SIMULATE_FUSION_H

#include "fsdp/Plan/OperatorWork.h"

namespace fsdp::simulate {

/// Changes the work of a plan's instructions (one each; Free where it is no
/// call) to that of fused kernels. Fusable calls of one phase are in the same
/// kernel if a chain of values links them that no other operator is part of.
/// A kernel reads each storage from outside once and writes those that are used
/// outside; the first call of it alone launches (`launches`, one each).
void fuse(const plan::Plan &plan, std::vector<plan::OperatorWork> &works,
          std::vector<bool> &launches);

} // namespace fsdp::simulate

#endif // FSDP_LIB_SIMULATE_FUSION_H
