//===- ProcessIdentity.h - which process, on which host -------------------===//
#ifndef FSDP_RUNTIME_COLLECTIVES_PROCESSIDENTITY_H
#define FSDP_RUNTIME_COLLECTIVES_PROCESSIDENTITY_H

#include <string>

#include <sys/types.h>

namespace fsdp::runtime {

/// Names this kernel and what processes it shows to this one. torchrun's own
/// groups of ranks ("nodes") may all be on one host.
std::string hostIdentity();

/// "<hostIdentity> <pid> <when it began>" of a process of this host: no other
/// one has it, on whatever host and at whatever time.
std::string processIdentity(pid_t pid);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_COLLECTIVES_PROCESSIDENTITY_H
