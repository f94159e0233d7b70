//===- ProcessIdentity.h - which process, on which host -------------------===//
#ifndef FSDP_RUNTIME_COLLECTIVES_PROCESSIDENTITY_H
#define FSDP_RUNTIME_COLLECTIVES_PROCESSIDENTITY_H

#include <string>

#include <sys/types.h>

namespace fsdp::runtime {

/// Identifies this kernel and the set of processes that it shows to this one.
/// torchrun's own groups of ranks ("nodes") may all be on one host.
std::string hostIdentity();

/// "<hostIdentity> <pid> <when it began>" of a process on this host: unique
/// across all hosts and for all time.
std::string processIdentity(pid_t pid);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_COLLECTIVES_PROCESSIDENTITY_H
