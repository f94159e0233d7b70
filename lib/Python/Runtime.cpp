//===- Runtime.cpp - the runtime as a module of Python --------------------===//
//
// Sessions of a plan in this process, with tensors of the process's own torch.
// python/fsdp_mlir/frontdoor is its only user and says what things mean; here
// are types, threads and errors. Calls that may wait release the interpreter's
// lock.
//
//===----------------------------------------------------------------------===//
#include "Audit.h"
#include "Checkpoints.h"

#include "fsdp/Plan/ModelCollectives.h"
#include "fsdp/Plan/SegmentLayout.h"
#include "fsdp/Runtime/Devices/SteeredAllocator.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Execution/OpenPlan.h"
#include "fsdp/Runtime/Execution/Session.h"
#include "fsdp/Runtime/Launch/Agreement.h"
#include "fsdp/Runtime/Launch/Connection.h"
#include "fsdp/Runtime/Launch/Rendezvous.h"
#include "fsdp/Runtime/Launch/RunFiles.h"
#include "fsdp/Runtime/Operators/Operators.h"

#include <torch/csrc/utils/pybind.h>

#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <cstring>

namespace py = pybind11;
using namespace fsdp;
using namespace fsdp::runtime;

namespace {

Backend backendOf(const std::string &comm) {
  if (comm == "shm")
    return Backend::Shm;
  if (comm == "gloo")
    return Backend::Gloo;
  throw InputError("comm: expected \"shm\" or \"gloo\", got \"" + comm + "\"");
}

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(int64_t(seconds * 1000));
}

/// A session with all that it borrows. Tensors that are handed out keep the
/// memory of the parameters alive.
class OpenPlan {
public:
  /// Of this rank alone. `operators`: those of the process that are not ATen's,
  /// which the plan may call.
  OpenPlan(const std::string &path, const std::string &allowedPlugin,
           const std::vector<std::string> &operators)
      : plan(open(path, allowedPlugin, operators)), planHash(hashOfPlan(plan)) {
  }

  /// With the other ranks: a collective, before all others. `comm`: as
  /// fsdp-run's --comm. `deadline`: as its --deadline. `other`: a session of
  /// the same model, whose parameters this one trains.
  void connect(Rendezvous &rendezvous, const std::string &comm, double deadline,
               const std::shared_ptr<OpenPlan> &other) {
    ranks = &rendezvous;
    if (rendezvous.worldSize() != plan.worldSize)
      throw InputError("the plan is for world size " +
                       std::to_string(plan.worldSize) + ", got " +
                       std::to_string(rendezvous.worldSize()) + " ranks");
    installSteeredAllocator();
    c10::InferenceMode guard;
    device = makeCpuDevice();
    connection = makeConnection(backendOf(comm), plan, rendezvous, *device,
                                milliseconds(deadline),
                                other ? &*other->connection : nullptr);
    session.emplace(plan, connection->comm(), *device, connection->position());
  }

  /// Calls `run`; reports a failure to the other ranks, and theirs to this one.
  template <typename F> auto guarded(F run) {
    try {
      c10::InferenceMode guard;
      // A plan has the casts of the autocast that the caller may have entered.
      c10::impl::ExcludeDispatchKeyGuard uncast(c10::autocast_dispatch_keyset);
      // Also if this rank itself failed: its state must not be used.
      if (connection->hasFailed())
        throw AbortedError("the session has failed");
      return run();
    } catch (const AbortedError &error) {
      std::string failure = connection->failure();
      if (failure.empty())
        throw;
      throw RunError(ranks->numberedInJob(failure));
    } catch (const std::exception &error) {
      connection->fail(error.what());
      throw RunError(ranks->numberedInJob(
          "rank " + std::to_string(ranks->rank()) + ": " + error.what()));
    }
  }

  /// The same memory as a tensor that autograd may meet.
  at::Tensor handOut(const at::Tensor &tensor) const {
    auto keep = connection->memory();
    return at::from_blob(
        tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(),
        [keep, tensor](void *) {}, tensor.options());
  }

  static plan::Plan open(const std::string &path,
                         const std::string &allowedPlugin,
                         const std::vector<std::string> &operators) {
    allowOperators(operators);
    plan::Plan plan = openPlan(path, allowedPlugin);
    checkDevice(plan, path, /*onGpu=*/false);
    return plan;
  }

  plan::Plan plan;
  const std::string planHash;        ///< as it was read
  const Rendezvous *ranks = nullptr; ///< kept by the Python object
  std::unique_ptr<Device> device;
  std::unique_ptr<Connection> connection;
  std::optional<Session> session;
};

py::dict describeSpec(const std::string &name, const plan::TensorSpec &spec) {
  py::dict entry;
  entry["name"] = name;
  entry["shape"] = spec.shape;
  entry["dtype"] = std::string(plan::dtypeName(spec.dtype));
  return entry;
}

/// The collectives of a step and of an evaluation in their order: what each is,
/// and the group of ranks; "" for those of the plan's own ranks.
std::vector<std::pair<std::string, std::string>>
collectives(const plan::Plan &plan) {
  std::vector<std::pair<std::string, std::string>> found;
  auto add = [&](const plan::Instruction &instruction) {
    std::visit(
        [&]<typename KindT>(const KindT &kind) {
          if constexpr (std::is_same_v<KindT, plan::Call>) {
            if (plan::isModelCollective(kind.op))
              found.emplace_back(kind.op, plan::axisOf(kind));
          } else if constexpr (requires { KindT::ownStream; }) {
            if constexpr (KindT::ownStream == plan::Stream::AllGather ||
                          KindT::ownStream == plan::Stream::ReduceScatter ||
                          KindT::ownStream == plan::Stream::AllReduce)
              found.emplace_back(std::string(kind.verb) + " " +
                                     plan.units[size_t(kind.unit)].name,
                                 "");
          }
        },
        instruction.kind);
  };
  for (const auto *program : {&plan.instructions, &plan.evaluation})
    std::for_each(program->begin(), program->end(), add);
  return found;
}

/// What the ranks that shard a model together must have in common, beside the
/// parameters: what each of their collectives moves, in order, and where it
/// lies in the segment of one host. The calls between them may differ.
std::string shared(const plan::Plan &plan) {
  std::string text;
  auto add = [&](const auto &...parts) { ((text += parts, text += ' '), ...); };
  auto addNumbers = [&](const auto &numbers) {
    for (auto number : numbers)
      add(std::to_string(number));
    text += '\n';
  };
  auto describe = [&](const plan::Instruction &instruction) {
    std::visit(
        [&]<typename KindT>(const KindT &kind) {
          if constexpr (std::is_same_v<KindT, plan::Call>) {
            if (plan::isModelCollective(kind.op))
              add(kind.op, plan::axisOf(kind), "\n");
          } else if constexpr (requires { kind.unit; }) {
            add(kind.verb, plan.units[size_t(kind.unit)].name,
                plan::whenName(instruction.when));
            if constexpr (requires { kind.params; })
              addNumbers(kind.params);
            if constexpr (std::is_same_v<KindT, plan::AllGather>)
              for (plan::ValueId out : kind.outs)
                add(out == -1 ? "-" : "+");
            text += '\n';
          }
        },
        instruction.kind);
  };
  for (const auto *program : {&plan.instructions, &plan.evaluation})
    std::for_each(program->begin(), program->end(), describe);
  const plan::SegmentLayout layout(plan);
  addNumbers(layout.params);
  addNumbers(layout.masters);
  addNumbers(layout.grads);
  addNumbers(layout.shardGrads);
  addNumbers(layout.reductionOf);
  addNumbers(layout.dedicated);
  for (const plan::SegmentLayout::KeptPlace &place : layout.kept)
    addNumbers(std::array{size_t(place.group), place.begin, place.stride});
  addNumbers(std::array{layout.vectorsBegin, layout.areasBegin,
                        layout.areaBytes, layout.totalBytes});
  return text;
}

py::list params(const OpenPlan &self) {
  py::list list;
  for (const plan::Param &param : self.plan.params) {
    py::dict entry = describeSpec(param.name, param.spec);
    entry["aliases"] = param.aliases;
    entry["ignored"] = param.unit == -1;
    entry["shard_dim"] = param.shardDim;
    list.append(entry);
  }
  return list;
}

py::list buffers(const OpenPlan &self) {
  py::list list;
  for (const plan::Buffer &buffer : self.plan.buffers)
    list.append(describeSpec(buffer.name, buffer.spec));
  return list;
}

py::list inputs(const OpenPlan &self) {
  py::list list;
  for (const plan::Input &input : self.plan.inputs)
    list.append(describeSpec(input.name, input.spec));
  return list;
}

/// `settings` with those of a group of torch.optim's that may change from step
/// to step; of a plug-in's, the learning rate.
plan::Optimizer follow(plan::Optimizer settings, const py::dict &group) {
  auto take = [&](const char *key, auto &value) {
    if (group.contains(key))
      value = group[key].cast<std::decay_t<decltype(value)>>();
  };
  take("lr", settings.lr);
  if (settings.isPlugin())
    return settings;
  std::pair betas(settings.beta1, settings.beta2);
  take("betas", betas);
  std::tie(settings.beta1, settings.beta2) = betas;
  take("eps", settings.eps);
  take("weight_decay", settings.weightDecay);
  take("momentum", settings.momentum);
  take("dampening", settings.dampening);
  take("nesterov", settings.nesterov);
  take("maximize", settings.maximize);
  return settings;
}

/// Groups as torch.optim has them, with indices into `params`; parameters
/// without a gradient are in no group.
py::list paramGroups(const OpenPlan &self) {
  std::vector<plan::Optimizer> settings =
      self.session->executor().optimizerSettings();
  py::list list;
  for (size_t g = 0; g < settings.size(); ++g) {
    const plan::Optimizer &o = settings[g];
    py::dict group;
    group["lr"] = o.lr;
    if (o.isPlugin()) {
      for (const auto &[name, value] : o.options)
        group[name.c_str()] = value;
    } else if (o.name == "sgd") {
      group["momentum"] = o.momentum;
      group["dampening"] = o.dampening;
      group["nesterov"] = o.nesterov;
    } else {
      group["betas"] = py::make_tuple(o.beta1, o.beta2);
      group["eps"] = o.eps;
      group["amsgrad"] = o.amsgrad;
    }
    if (!o.isPlugin()) {
      group["weight_decay"] = o.weightDecay;
      group["maximize"] = o.maximize;
    }
    std::vector<int32_t> members;
    for (const plan::Instruction &instruction : self.plan.instructions)
      if (const auto *step =
              std::get_if<plan::OptimizerStep>(&instruction.kind))
        for (size_t i = 0; i < step->params.size(); ++i)
          if ((step->groups.empty() ? 0 : size_t(step->groups[i])) == g)
            members.push_back(step->params[i]);
    group["params"] = members;
    list.append(group);
  }
  return list;
}

using Release = py::call_guard<py::gil_scoped_release>;
using SessionClass = py::class_<OpenPlan, std::shared_ptr<OpenPlan>>;

void bindRendezvous(py::module_ &m) {
  py::class_<Rendezvous>(m, "Rendezvous")
      .def(py::init(
               [] { return std::make_unique<Rendezvous>(rankEnvironment()); }),
           Release())
      .def(
          "among",
          [](const Rendezvous &self, const std::vector<int64_t> &members) {
            return std::make_unique<Rendezvous>(self, members);
          },
          py::arg("members"))
      .def_property_readonly("rank", &Rendezvous::rank)
      .def_property_readonly("world_size", &Rendezvous::worldSize)
      .def(
          "on_one_host", [](Rendezvous &self) { return !self.rankElsewhere(); },
          Release())
      .def(
          "exchange",
          [](Rendezvous &self, const std::string &text, int64_t seconds) {
            return self.exchange(text, std::chrono::seconds(seconds));
          },
          py::arg("text"), py::arg("seconds"), Release());

  py::class_<Agreement>(m, "Agreement")
      .def(py::init([](const std::string &comm, Rendezvous &rendezvous,
                       double seconds) {
             return makeAgreement(backendOf(comm), rendezvous,
                                  milliseconds(seconds));
           }),
           py::arg("comm"), py::arg("rendezvous"), py::arg("deadline"),
           Release())
      .def("exchange", &Agreement::exchange, py::arg("word"), Release());
}

/// Opening a plan, and what it says.
SessionClass bindPlan(py::module_ &m) {
  SessionClass session(m, "Session");
  session
      .def(py::init<const std::string &, const std::string &,
                    const std::vector<std::string> &>(),
           Release())
      .def("connect", &OpenPlan::connect, py::keep_alive<1, 2>(), Release())
      .def_property_readonly(
          "collectives",
          [](const OpenPlan &self) { return collectives(self.plan); })
      .def_property_readonly(
          "shared", [](const OpenPlan &self) { return shared(self.plan); })
      .def_property_readonly("params", &params)
      .def_property_readonly("buffers", &buffers)
      .def_property_readonly("inputs", &inputs)
      .def_property_readonly("loss_dtype", [](const OpenPlan &self) {
        return std::string(
            plan::dtypeName(self.plan.values[self.plan.loss].dtype));
      });
  return session;
}

void bindTraining(SessionClass &session) {
  session
      .def(
          "initialise",
          [](OpenPlan &self, uint64_t seed) {
            self.guarded([&] { self.session->initialise(seed); });
          },
          Release())
      .def(
          "start",
          [](OpenPlan &self) {
            self.guarded([&] {
              self.session->start();
              self.session->setCallerWrites();
            });
          },
          Release())
      .def("follow",
           [](OpenPlan &self, const std::vector<py::dict> &groups) {
             Executor &executor = self.session->executor();
             std::vector<plan::Optimizer> settings =
                 executor.optimizerSettings();
             if (groups.size() != settings.size())
               throw InputError("expected " + std::to_string(settings.size()) +
                                " parameter groups, got " +
                                std::to_string(groups.size()));
             for (size_t i = 0; i < groups.size(); ++i)
               settings[i] = follow(settings[i], groups[i]);
             executor.setOptimizerSettings(settings);
           })
      .def(
          "step",
          [](OpenPlan &self,
             const std::vector<std::vector<at::Tensor>> &microbatches) {
            return self.guarded([&] {
              return self.session->step([&](int64_t microbatch) {
                return microbatches.at(size_t(microbatch));
              });
            });
          },
          Release())
      .def_property_readonly(
          "evaluates",
          [](const OpenPlan &self) { return !self.plan.evaluation.empty(); })
      .def(
          "evaluate",
          [](OpenPlan &self, const std::vector<at::Tensor> &batch) {
            return self.guarded([&] {
              return self.session->evaluate([&](int64_t) { return batch; });
            });
          },
          Release());
}

/// Parameters, gradients and the optimizer's state, as tensors in the memory
/// that the plan works in.
void bindTensors(SessionClass &session) {
  session
      .def("shard",
           [](OpenPlan &self, int32_t param) {
             return self.handOut(self.session->comm().shard(param));
           })
      .def("padded_shard",
           [](OpenPlan &self, int32_t param) {
             return self.handOut(self.session->comm().paddedShard(param));
           })
      .def("buffer",
           [](OpenPlan &self, int32_t buffer) {
             return self.handOut(self.session->buffers().at(size_t(buffer)));
           })
      .def("bind_buffer",
           [](OpenPlan &self, int32_t buffer, const at::Tensor &tensor) {
             self.session->bindBuffer(buffer, tensor.detach());
           })
      .def("bind_optimizer_state",
           [](OpenPlan &self, int32_t param,
              const ShardedOptimizer::NamedTensors &state) {
             self.session->bindOptimizerState(param, state);
           })
      .def("take_gradients",
           [](OpenPlan &self) {
             py::list list;
             for (const auto &[param, gradient] :
                  self.session->executor().takeGradients())
               list.append(py::make_tuple(param, self.handOut(gradient)));
             return list;
           })
      .def("optimizer_state", [](OpenPlan &self, int32_t param) {
        py::dict state;
        for (const auto &[name, tensor] : self.session->optimizerState(param))
          state[name.c_str()] = self.handOut(tensor);
        return state;
      });
}

/// What counts as steps go on.
void bindProgress(SessionClass &session) {
  session
      .def_property(
          "steps", [](const OpenPlan &self) { return self.session->steps(); },
          [](OpenPlan &self, int64_t steps) { self.session->setSteps(steps); })
      // Scale and growth tracker, or None without a loss scaler.
      .def_property(
          "scaler",
          [](OpenPlan &self) -> std::optional<std::pair<float, int32_t>> {
            GradScaler *scaler = self.session->executor().gradScaler();
            if (!scaler)
              return std::nullopt;
            GradScaler::State state = scaler->state();
            return std::pair(state.scale, state.growthTracker);
          },
          [](OpenPlan &self, const std::pair<float, int32_t> &state) {
            c10::InferenceMode guard;
            if (GradScaler *scaler = self.session->executor().gradScaler())
              scaler->setState({state.first, state.second});
          })
      // Updates of the optimizer: steps except those that a loss scaler
      // skipped.
      .def_property(
          "updates",
          [](OpenPlan &self) -> std::optional<int64_t> {
            auto *optimizer = self.session->executor().shardedOptimizer();
            return optimizer ? std::optional(optimizer->steps()) : std::nullopt;
          },
          [](OpenPlan &self, int64_t updates) {
            if (auto *optimizer = self.session->executor().shardedOptimizer())
              optimizer->setSteps(updates);
          })
      .def_readonly("plan_hash", &OpenPlan::planHash)
      .def_property_readonly("param_groups", &paramGroups)
      .def_property_readonly("counts_steps", [](const OpenPlan &self) {
        return self.plan.lrSchedule || self.plan.optimizer.isPlugin();
      });
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "The runtime of fsdp-mlir: executes plans in this process.";
  // Calls a function whose tensors outlive the call of a plan that it is in.
  m.def("on_heap", [](const py::function &function) {
    UseHeap heap;
    return function();
  });
  m.def("move_storage", [](const at::Tensor &tensor, const at::Tensor &memory) {
    c10::StorageImpl *own = tensor.storage().unsafeGetStorageImpl();
    std::memcpy(memory.mutable_data_ptr(), own->data(), own->nbytes());
    auto *keep = new c10::Storage(memory.storage());
    own->set_data_ptr_noswap(c10::DataPtr(
        memory.mutable_data_ptr(), keep,
        [](void *kept) { delete static_cast<c10::Storage *>(kept); },
        memory.device()));
  });
  py::class_<StepResult>(m, "StepResult")
      .def_readonly("loss", &StepResult::loss)
      .def_readonly("learning_rate", &StepResult::learningRate)
      .def_readonly("grad_norm", &StepResult::gradNorm)
      .def_readonly("loss_scale", &StepResult::lossScale)
      .def_readonly("skipped", &StepResult::skipped);

  bindAudit(m);
  bindRendezvous(m);
  SessionClass session = bindPlan(m);
  bindTraining(session);
  bindTensors(session);
  bindProgress(session);
  bindCheckpoints(m);
}
