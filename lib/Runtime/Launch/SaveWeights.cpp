//===- SaveWeights.cpp - the final weights of a run -----------------------===//
#include "fsdp/Runtime/Launch/SaveWeights.h"
#include "fsdp/Runtime/Files/SafeTensors.h"
#include "fsdp/Runtime/Memory/Finite.h"

#include <cstdio>
#include <string>
#include <vector>

namespace fsdp::runtime {

namespace {

/// Of weights that are about to be written.
void warnOfWeights(const std::string &path,
                   const std::vector<std::string> &notFinite) {
  if (notFinite.empty())
    return;
  std::string others =
      notFinite.size() == 1
          ? ""
          : " and " + std::to_string(notFinite.size() - 1) + " more";
  std::fprintf(stderr, "fsdp-run: warning: %s: not finite: \"%s\"%s\n",
               path.c_str(), notFinite[0].c_str(), others.c_str());
}

} // namespace

void saveWeights(const plan::Plan &plan, Session &session, OutputFile *file) {
  bool writes = session.comm().rank() == 0;
  std::vector<std::string> notFinite;
  std::vector<NamedTensor> tensors;
  auto add = [&](const std::string &name, const plan::TensorSpec &spec,
                 const at::Tensor &tensor) {
    tensors.push_back({name,
                       spec,
                       {static_cast<const std::byte *>(tensor.const_data_ptr()),
                        tensor.nbytes()}});
  };
  std::vector<at::Tensor> params;
  for (size_t p = 0; p < plan.params.size(); ++p) {
    params.push_back(session.fullParam(int32_t(p)).cpu());
    session.progress().beat();
    if (writes && !allFinite(params[p]))
      notFinite.push_back(plan.params[p].name);
    add(plan.params[p].name, plan.params[p].spec, params[p]);
    for (const std::string &alias : plan.params[p].aliases)
      add(alias, plan.params[p].spec, params[p]);
  }
  std::vector<at::Tensor> buffers;
  for (size_t b = 0; b < plan.buffers.size(); ++b) {
    buffers.push_back(session.buffers()[b].cpu().contiguous());
    if (plan.buffers[b].persistent)
      add(plan.buffers[b].name, plan.buffers[b].spec, buffers[b]);
  }
  // No rank has failed meanwhile.
  session.quiesce();
  if (!writes)
    return;
  warnOfWeights(file->path(), notFinite);
  writeSafeTensors(*file, tensors);
}

} // namespace fsdp::runtime
