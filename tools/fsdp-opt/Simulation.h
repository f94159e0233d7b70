//===- Simulation.h - fsdp-opt --simulate ---------------------------------===//
#ifndef FSDP_TOOLS_FSDPOPT_SIMULATION_H
#define FSDP_TOOLS_FSDPOPT_SIMULATION_H

#include "fsdp/Plan/Memory.h"
#include "fsdp/Plan/Plan.h"
#include "mlir/Support/LogicalResult.h"
#include "llvm/ADT/StringRef.h"
#include "llvm/Support/raw_ostream.h"

#include <string>

namespace mlir::fsdp {

/// True when the options name a device, a cluster, a profile or a measured
/// step.
bool isSimulationAsked();

/// True when the options name a measured step.
bool isMeasuredAsked();

/// Refuses options on which what --emit names does not depend. Prints errors
/// itself.
LogicalResult checkSimulationOptions(llvm::StringRef emitted);

/// The device that --device names, empty without it. Prints errors itself.
FailureOr<std::string> getDeviceOption();

/// Bytes that the profile says operators took for themselves, 0 without one.
/// Prints errors itself.
FailureOr<int64_t> getMeasuredScratch();

/// The device where the options name none.
void setDefaultDevice(const std::string &device);

/// Simulates a step as the options say and prints its time, what of it is
/// exposed communication, tokens a second, MFU, and whether its peak memory
/// fits; where a measured step is asked for, that beside it. The plan is
/// complete. Prints errors itself.
LogicalResult printSimulatedStats(const ::fsdp::plan::Plan &plan,
                                  llvm::raw_ostream &os);

/// The step of the ranks that --ranks names, as a Chrome trace; where a
/// measured step is asked for, that beside it. The plan is complete. Prints
/// errors itself.
LogicalResult printSimulatedTrace(const ::fsdp::plan::Plan &plan,
                                  llvm::raw_ostream &os);

/// The step of rank 0 as a page for people. The plan has an arena. Prints
/// errors itself.
LogicalResult printSimulatedPage(const ::fsdp::plan::Plan &plan,
                                 llvm::raw_ostream &os);

/// What changed from one plan to another; in time too where the options name a
/// device. Prints errors itself.
LogicalResult printPlanDifference(const ::fsdp::plan::Plan &a,
                                  const ::fsdp::plan::Plan &b,
                                  llvm::raw_ostream &os);

} // namespace mlir::fsdp

#endif // FSDP_TOOLS_FSDPOPT_SIMULATION_H
