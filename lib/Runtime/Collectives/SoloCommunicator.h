//===- SoloCommunicator.h - a group of one rank ---------------------------===//
#ifndef FSDP_RUNTIME_COLLECTIVES_SOLOCOMMUNICATOR_H
#define FSDP_RUNTIME_COLLECTIVES_SOLOCOMMUNICATOR_H

#include "fsdp/Runtime/Collectives/Communicator.h"

namespace fsdp::runtime {

/// Copies, in the order of the device's current stream; needs no backend, on
/// any device.
std::unique_ptr<Communicator> makeSoloCommunicator();

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_COLLECTIVES_SOLOCOMMUNICATOR_H
