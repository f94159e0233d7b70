//===- SoloCommunicator.cpp - a group of one rank -------------------------===//
#include "SoloCommunicator.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>

#include <atomic>

namespace fsdp::runtime {

namespace {

class SoloCommunicator : public Communicator {
public:
  int64_t rank() const override { return 0; }
  int64_t size() const override { return 1; }

  Wait allGather(const std::string &what,
                 const std::vector<Part> &parts) override {
    check(what);
    for (const Part &part : parts)
      copy(part.whole, part.own);
    return {};
  }

  Wait reduceScatter(const std::string &what, const at::Tensor &out,
                     const at::Tensor &in, ReduceOp,
                     double premultiply) override {
    check(what);
    copy(out, in);
    if (premultiply != 1)
      out.mul_(at::scalar_tensor(premultiply, out.options()));
    return {};
  }

  Wait allReduce(const std::string &what, const at::Tensor &,
                 ReduceOp) override {
    check(what);
    return {};
  }

  void abort() override { aborted = true; }

private:
  void check(const std::string &what) const {
    if (aborted)
      throw AbortedError(what + ": this rank was aborted");
  }

  static void copy(const at::Tensor &to, const at::Tensor &from) {
    if (to.const_data_ptr() != from.const_data_ptr())
      to.view({-1}).copy_(from.view({-1}), /*non_blocking=*/true);
  }

  std::atomic<bool> aborted = false;
};

} // namespace

std::unique_ptr<Communicator> makeSoloCommunicator() {
  return std::make_unique<SoloCommunicator>();
}

} // namespace fsdp::runtime
