//===- device.h - see context.h -------------------------------------------===//
#ifndef FSDP_RUNTIME_GLOOSTUB_DEVICE_H
#define FSDP_RUNTIME_GLOOSTUB_DEVICE_H

namespace gloo::transport {

class Device;

class UnboundBuffer {
public:
  virtual ~UnboundBuffer();
};

} // namespace gloo::transport

#endif // FSDP_RUNTIME_GLOOSTUB_DEVICE_H
