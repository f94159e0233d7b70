//===- Fixtures.h - files and processes for tests -------------------------===//
#ifndef FSDP_UNITTESTS_SUPPORT_FIXTURES_H
#define FSDP_UNITTESTS_SUPPORT_FIXTURES_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Collectives/Comm.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace fsdp::test {

using Tensors = std::map<std::string, at::Tensor>;

/// A folder of its own, removed at the end of the test.
class ScratchDir {
public:
  ScratchDir();
  ~ScratchDir();
  std::string operator/(const std::string &name) const {
    return path + "/" + name;
  }

private:
  std::string path;
};

/// The message of the InputError that `run` throws, or "no error".
std::string errorOf(const std::function<void()> &run);

void writeText(const std::string &path, const std::string &text);
std::string readText(const std::string &path);
void writeTensors(const std::string &path, const Tensors &tensors);
/// Copies of all tensors in a safetensors file.
Tensors readTensors(const std::string &path);

/// The sample plan's weights and buffer, the same in every call.
Tensors sampleWeights();
/// `samples` samples of the sample plan's inputs.
Tensors sampleData(int64_t samples);
/// Writes plan.json and model.safetensors into a folder, and data.safetensors
/// with `samples` samples.
void writeSample(const ScratchDir &dir, const plan::Plan &plan,
                 int64_t samples = 32);

/// The sums of gradients of all ranks, each rank's by name, that are reduced
/// unit by unit: of FSDP2's messages, in the order in which Gloo adds them.
Tensors sumAroundRing(const std::vector<Tensors> &grads,
                      const std::vector<std::vector<std::string>> &units);

struct ToolResult {
  int status = -1; ///< exit status, or -signal
  std::string err;
  double seconds = 0;
};

/// Runs fsdp-run in a process group of its own, with `environment` added,
/// and waits for it. Fails the test if processes of the group are left.
ToolResult runTool(const std::vector<std::string> &args,
                   const std::map<std::string, std::string> &environment = {});

/// Whether each element of `got` is at most `roundings` roundings of its dtype
/// away from that of `exact`, which is in double: a sum of terms whose absolute
/// values add up to `magnitude` is off by at most n u / (1 - n u) of that
/// (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2), where
/// u is half of the dtype's epsilon.
bool isRounded(const at::Tensor &got, const at::Tensor &exact,
               const at::Tensor &magnitude, int64_t roundings);

/// The results of a collective, once they are there.
std::vector<at::Tensor> await(const runtime::Collective &collective);

/// Forks one process per rank, runs `body` in each and waits for all. Returns
/// the ranks' error messages, empty where `body` returned.
std::vector<std::string> forkRanks(int64_t ranks,
                                   const std::function<void(int64_t)> &body);

} // namespace fsdp::test

#endif // FSDP_UNITTESTS_SUPPORT_FIXTURES_H
