//===- context.h - what c10d's header needs of Gloo's headers -------------===//
//
// torch's wheel exports ProcessGroupGloo from libtorch_cpu and ships c10d's
// header of it, but not the headers of Gloo that this includes. These declare
// the few names that it uses: all are only pointed to or called here, never
// laid out, and the definitions are libtorch_cpu's.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_GLOOSTUB_CONTEXT_H
#define FSDP_RUNTIME_GLOOSTUB_CONTEXT_H

#include <chrono>

namespace gloo {

class Context {
public:
  virtual ~Context();
  void setTimeout(std::chrono::milliseconds timeout);
  /// Closes the sockets to all peers. Operations that wait for one go on to do
  /// so until their timeout; those of the peers fail.
  void closeConnections();
};

} // namespace gloo

#endif // FSDP_RUNTIME_GLOOSTUB_CONTEXT_H
