//===- Simulation.h - fsdp-opt --simulate ---------------------------------===//
#ifndef FSDP_TOOLS_FSDPOPT_SIMULATION_H
#define FSDP_TOOLS_FSDPOPT_SIMULATION_H

#include "fsdp/Plan/Memory.h"
#include "fsdp/Plan/Plan.h"
#include "fsdp/Support/Outputs.h"
#include "mlir/Support/LogicalResult.h"
#include "llvm/ADT/StringRef.h"
#include "llvm/Support/raw_ostream.h"

#include <string>
#include <vector>

namespace mlir::fsdp {

/// True when the options name a device, a cluster, a profile or a measured
/// step.
bool isSimulationAsked();

/// True when the options name a measured step.
bool isMeasuredAsked();

/// Rejects options that have no effect on what --emit names. Prints errors
/// itself.
LogicalResult checkSimulationOptions(llvm::StringRef emitted);

/// The files that the options name.
std::vector<::fsdp::NamedFile> getSimulationFiles();

/// The device that --device names, empty without it. Prints errors itself.
FailureOr<std::string> getDeviceOption();

/// Bytes that operators took for themselves according to the profile, 0 without
/// one.
/// Prints errors itself.
FailureOr<int64_t> getMeasuredScratch();

/// Sets the device for when the options name none.
void setDefaultDevice(const std::string &device);

/// Simulates a step as the options say and prints its time, how much of it is
/// exposed communication, tokens per second, MFU, and whether its peak memory
/// fits; if a measured step is asked for, it is printed beside. The plan is
/// complete. Prints errors itself.
LogicalResult printSimulatedStats(const ::fsdp::plan::Plan &plan,
                                  llvm::raw_ostream &os);

/// Prints the step of the ranks that --ranks names, as a Chrome trace; if a
/// measured step is asked for, it is beside it. The plan is complete. Prints
/// errors itself.
LogicalResult printSimulatedTrace(const ::fsdp::plan::Plan &plan,
                                  llvm::raw_ostream &os);

/// Prints the step of rank 0 as a page for people. The plan has an arena.
/// Prints errors itself.
LogicalResult printSimulatedPage(const ::fsdp::plan::Plan &plan,
                                 llvm::raw_ostream &os);

/// Prints what changed from one plan to another; in time too if the options
/// name a device. Prints errors itself.
LogicalResult printPlanDifference(const ::fsdp::plan::Plan &a,
                                  const ::fsdp::plan::Plan &b,
                                  llvm::raw_ostream &os);

} // namespace mlir::fsdp

#endif // FSDP_TOOLS_FSDPOPT_SIMULATION_H
