//===- Lion.cpp - Lion as an optimizer plug-in ----------------------------===//
//
// Chen et al., Symbolic Discovery of Optimization Algorithms, algorithm 2
// (https://arxiv.org/abs/2302.06675). Options: beta1, beta2, weight_decay.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Runtime/Optimizer/OptimizerPlugin.h"

#include <stdexcept>

namespace {

class Lion : public fsdp::runtime::OptimizerPlugin {
public:
  explicit Lion(const fsdp::runtime::OptimizerOptions &options) {
    for (const auto &[name, value] : options) {
      if (name == "beta1")
        beta1 = value;
      else if (name == "beta2")
        beta2 = value;
      else if (name == "weight_decay")
        weightDecay = value;
      else
        throw std::invalid_argument("lion has no option \"" + name + "\"");
    }
  }

  size_t numStates() const override { return 1; }

  void update(at::Tensor &param, const at::Tensor &grad,
              std::vector<at::Tensor> &states, int64_t step,
              double lr) override {
    at::Tensor &momentum = states[0];
    param.mul_(1 - lr * weightDecay);
    at::Tensor direction = momentum.mul(beta1).add_(grad, 1 - beta1);
    param.add_(direction.sign_(), -lr);
    momentum.mul_(beta2).add_(grad, 1 - beta2);
  }

private:
  double beta1 = 0.9;
  double beta2 = 0.99;
  double weightDecay = 0.0;
};

} // namespace

FSDP_OPTIMIZER_PLUGIN(Lion)
