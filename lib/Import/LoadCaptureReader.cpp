//===- LoadCaptureReader.cpp - LibTorch only where a capture is read ------===//
#include "fsdp/Import/Capture.h"

#include <dlfcn.h>

using namespace fsdp;

using Reader = void (*)(const std::string &path, Capture &capture);

/// The library stays loaded: it registers operators.
static Reader loadReader() {
  // By the RUNPATH of the program, as the libraries that it is linked with.
  void *library = dlopen("libFSDPCaptureReader.so", RTLD_NOW | RTLD_LOCAL);
  void *reader = library ? dlsym(library, "fsdpReadCapture") : nullptr;
  if (!reader)
    throw CaptureError("expected libFSDPCaptureReader.so in ../lib beside the "
                       "program, got: " +
                       std::string(dlerror()));
  return reinterpret_cast<Reader>(reader);
}

static Reader reader() {
  static const Reader read = loadReader();
  return read;
}

void fsdp::loadCaptureReader() { reader(); }

Capture fsdp::loadCapture(const std::string &path) {
  Capture capture;
  reader()(path, capture);
  return capture;
}
