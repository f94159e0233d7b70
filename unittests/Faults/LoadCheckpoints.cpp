//===- LoadCheckpoints.cpp - what a run would resume from -----------------===//
//
// For each folder of checkpoints that is a line of stdin, a line of JSON: the
// step of the newest checkpoint that is valid, and a hash of all that it holds,
// which is none of its own. With --trusting files are not compared with their
// hashes: tests that look for damage must then find some.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Runtime/Checkpoint/CheckpointFolder.h"
#include "fsdp/Runtime/Files/SafeTensors.h"

#include <nlohmann/json.hpp>

#include <iostream>
#include <string>
#include <string_view>
#include <vector>

using namespace fsdp::runtime;
using nlohmann::json;

namespace {

std::string digestOf(const NativeCheckpoint &checkpoint) {
  std::string text;
  for (const auto &[name, tensor] : checkpoint.state().tensors) {
    Chunk whole{std::vector<int64_t>(tensor.spec.shape.size()),
                tensor.spec.shape};
    std::vector<std::byte> bytes(size_t(tensor.spec.numBytes()));
    copyBox(tensor, whole, bytes);
    text += name + "\n" + describe(tensor.spec) + "\n";
    text.append(reinterpret_cast<const char *>(bytes.data()), bytes.size());
  }
  return hashBytes(text);
}

json load(const std::string &path, bool trusting) {
  json found = {{"folder", path}, {"step", nullptr}};
  auto newest = openNewest(
      CheckpointFolder(path), [](const std::string &) {},
      [&](const NativeCheckpoint &checkpoint) {
        if (!trusting)
          checkpoint.verifyAll();
        // What cannot be read is not valid either.
        found["digest"] = digestOf(checkpoint);
      });
  if (newest)
    found["step"] = newest->manifest().state.step;
  return found;
}

} // namespace

int main(int argc, char **argv) {
  bool trusting = argc > 1 && std::string_view(argv[1]) == "--trusting";
  for (std::string line; std::getline(std::cin, line);)
    std::cout << load(line, trusting)
                     .dump(-1, ' ', false, json::error_handler_t::replace)
              << "\n";
}
