//===- SamplePlan.cpp - a small complete training step --------------------===//
#include "Support/SamplePlan.h"
#include "fsdp/Plan/Operands.h"

#include <algorithm>
#include <map>

namespace fsdp::test {

using namespace plan;

namespace {

class Builder {
public:
  Plan plan;
  Phase phase = Phase::Forward;

  ValueId value(std::vector<int64_t> shape) {
    plan.values.push_back({std::move(shape), DType::Float32});
    return ValueId(plan.values.size()) - 1;
  }
  int32_t param(std::string name, std::vector<int64_t> shape, int32_t unit,
                bool requiresGrad = true) {
    plan.params.push_back({std::move(name),
                           {},
                           {std::move(shape), DType::Float32},
                           unit,
                           requiresGrad});
    auto id = int32_t(plan.params.size()) - 1;
    plan.units[unit].params.push_back(id);
    return id;
  }
  ValueId input(std::string name, std::vector<int64_t> shape) {
    ValueId id = value(shape);
    plan.inputs.push_back(
        {std::move(name), {std::move(shape), DType::Float32}, id, 0, 2});
    return id;
  }
  void add(decltype(Instruction::kind) kind) {
    plan.instructions.push_back({std::move(kind), phase, -1, {}});
  }
  ValueId call(std::string op, std::string overload, ArgList args,
               std::vector<int64_t> shape, int32_t module = 0,
               int32_t reduceInputOf = -1) {
    ValueId out = value(std::move(shape));
    if (op == "aten::t") {
      ValueId in = std::get<TensorArg>(args[0].value).value;
      ValueId storage = plan.values[in].storage;
      plan.values[out].storage = storage == -1 ? in : storage;
    }
    plan.instructions.push_back({Call{{std::move(op), std::move(overload)},
                                      std::move(args),
                                      {out},
                                      reduceInputOf},
                                 phase,
                                 module,
                                 {}});
    return out;
  }
  std::vector<ValueId> gather(int32_t unit) {
    AllGather gather{unit, {}};
    for (int32_t param : plan.units[unit].params)
      gather.outs.push_back(value(plan.params[param].spec.shape));
    add(gather);
    return gather.outs;
  }
  std::vector<ValueId> reduce(int32_t unit, std::vector<int32_t> params,
                              std::vector<ValueId> ins) {
    ReduceScatter reduce{unit, std::move(params), std::move(ins), {}};
    for (int32_t param : reduce.params) {
      std::vector<int64_t> shape = plan.params[param].spec.shape;
      shape[0] = shardRows(shape[0], plan.shards(), 0).size();
      reduce.outs.push_back(value(shape));
    }
    add(reduce);
    if (plan.replicas == 1)
      return reduce.outs;
    AllReduce all{unit, reduce.params, reduce.outs, {}};
    for (ValueId shard : all.ins)
      all.outs.push_back(value(plan.values[shard].shape));
    add(all);
    return all.outs;
  }
  void free(ValueId id) { plan.instructions.back().frees.push_back(id); }
};

Arg t(ValueId id) { return {TensorArg{id}}; }
Arg i(int64_t v) { return {v}; }
Arg f(double v) { return {v}; }

} // namespace

Plan samplePlan(int64_t worldSize, bool transposedGrad, int64_t replicas) {
  Builder b;
  b.plan.producer = "test";
  b.plan.model = "Regression";
  b.plan.worldSize = worldSize;
  b.plan.replicas = replicas;
  b.plan.weights = {"model.safetensors", ""};
  b.plan.optimizer.name = "sgd";
  b.plan.optimizer.lr = 0.1;
  b.plan.modules = {"", "layer"};
  b.plan.units = {{"layer", {}, true}, {"(root)", {}, false}};
  b.plan.buffers = {{"shift", {{kOutputs}, DType::Float32}, true}};
  int32_t w1 = b.param("layer.w1", {kFeatures, 7}, 0);
  int32_t w2 = b.param("w2", {7, kOutputs}, 1);
  int32_t bias = b.param("b", {kOutputs}, 1);
  b.param("scale", {1}, 1, /*requiresGrad=*/false);
  b.plan.params[w2].aliases = {"head.w2"};

  ValueId x = b.input("x", {kBatch, kFeatures});
  ValueId y = b.input("y", {kBatch, kOutputs});
  std::vector<ValueId> root = b.gather(1);
  std::vector<ValueId> layer = b.gather(0);
  ValueId h = b.call("aten::mm", "", {t(x), t(layer[0])}, {kBatch, 7}, 1);
  b.add(Reshard{0});
  ValueId shift = b.value({kOutputs});
  b.add(ReadBuffer{0, shift});
  ValueId z = b.call("aten::mm", "", {t(h), t(root[0])}, {kBatch, kOutputs});
  ValueId z1 = b.call("aten::add", "Tensor", {t(z), t(root[1]), i(1)},
                      {kBatch, kOutputs});
  b.free(z);
  ValueId z2 = b.call("aten::add", "Tensor", {t(z1), t(shift), i(1)},
                      {kBatch, kOutputs});
  ValueId z3 =
      b.call("aten::mul", "Tensor", {t(z2), t(root[2])}, {kBatch, kOutputs});
  ValueId d =
      b.call("aten::sub", "Tensor", {t(z3), t(y), i(1)}, {kBatch, kOutputs});
  ValueId sq = b.call("aten::mul", "Tensor", {t(d), t(d)}, {kBatch, kOutputs});
  b.plan.loss = b.call("aten::mean", "", {t(sq), {NoneArg{}}}, {});

  b.phase = Phase::Backward;
  ValueId gd = b.call("aten::mul", "Scalar",
                      {t(d), f(2.0 / (kBatch * kOutputs))}, {kBatch, kOutputs});
  ValueId g =
      b.call("aten::mul", "Tensor", {t(gd), t(root[2])}, {kBatch, kOutputs});
  // Written long before its reduction.
  ValueId gb = b.call("aten::sum", "dim_IntList",
                      {t(g), {ArgList{i(0)}}, {false}, {NoneArg{}}}, {kOutputs},
                      0, bias);
  ValueId rootT = b.call("aten::t", "", {t(root[0])}, {kOutputs, 7});
  ValueId gh = b.call("aten::mm", "", {t(g), t(rootT)}, {kBatch, 7});
  ValueId gw2;
  if (transposedGrad) {
    ValueId gT = b.call("aten::t", "", {t(g)}, {kOutputs, kBatch});
    ValueId product =
        b.call("aten::mm", "", {t(gT), t(h)}, {kOutputs, 7}, 0, w2);
    gw2 = b.call("aten::t", "", {t(product)}, {7, kOutputs});
  } else {
    ValueId hT = b.call("aten::t", "", {t(h)}, {7, kBatch});
    gw2 = b.call("aten::mm", "", {t(hT), t(g)}, {7, kOutputs});
  }
  b.gather(0);
  ValueId xT = b.call("aten::t", "", {t(x)}, {kFeatures, kBatch}, 1);
  ValueId gw1 = b.call("aten::mm", "", {t(xT), t(gh)}, {kFeatures, 7}, 1, w1);
  b.add(Reshard{0});
  std::vector<ValueId> layerGrads = b.reduce(0, {w1}, {gw1});
  b.add(Reshard{1});
  std::vector<ValueId> rootGrads = b.reduce(1, {w2, bias}, {gw2, gb});

  b.phase = Phase::Optimizer;
  b.add(OptimizerStep{
      {w1, w2, bias}, {layerGrads[0], rootGrads[0], rootGrads[1]}, {}});
  return b.plan;
}

void addInit(Plan &plan) {
  auto value = [&](const TensorSpec &spec) {
    plan.values.push_back(spec);
    return ValueId(plan.values.size()) - 1;
  };
  auto add = [&](decltype(Instruction::kind) kind, std::vector<ValueId> frees) {
    plan.init.push_back({std::move(kind), Phase::Forward, 0, std::move(frees)});
  };
  Arg none{NoneArg{}};
  for (int32_t p = 0; p < int32_t(plan.params.size()); ++p) {
    const TensorSpec &spec = plan.params[p].spec;
    ArgList shape;
    for (int64_t extent : spec.shape)
      shape.push_back(i(extent));
    ValueId empty = value(spec), drawn = value(spec);
    add(Call{{"aten::empty", "memory_format"},
             {{shape}, i(6), none, {DeviceArg{}}, none, none},
             {empty}},
        {});
    add(Call{{"aten::normal_", ""},
             {t(empty), f(0), f(1), none},
             {drawn},
             -1,
             {empty}},
        {empty});
    add(WriteParam{p, drawn}, {drawn});
  }
  const TensorSpec &spec = plan.buffers[0].spec;
  const float numbers[kOutputs] = {1, 2, 3, 4, 5};
  ValueId constant = value(spec), twice = value(spec);
  add(Constant{std::string(reinterpret_cast<const char *>(numbers),
                           sizeof(numbers)),
               constant},
      {});
  add(Call{{"aten::mul", "Scalar"}, {t(constant), f(2)}, {twice}}, {constant});
  add(WriteBuffer{0, twice}, {twice});
  plan.weights = {};
}

void accumulateWhole(Plan &plan) {
  plan.accumulationSteps = 2;
  std::vector<Instruction> instructions;
  for (Instruction &instruction : plan.instructions) {
    if (auto *call = std::get_if<Call>(&instruction.kind))
      call->reduceInputOf = -1;
    if (auto *reduce = std::get_if<ReduceScatter>(&instruction.kind)) {
      Accumulate sums{reduce->params, reduce->ins, {}};
      for (ValueId &in : reduce->ins) {
        plan.values.push_back({plan.values[size_t(in)].shape, DType::Float64});
        in = ValueId(plan.values.size()) - 1;
      }
      sums.outs = reduce->ins;
      instruction.when = When::Last;
      instructions.push_back({std::move(sums), Phase::Backward, -1, {}});
    }
    instructions.push_back(std::move(instruction));
  }
  plan.instructions = std::move(instructions);
}

void stageState(Plan &plan) {
  EventId events = 0;
  for (const Instruction &instruction : plan.instructions)
    events = std::max(events, instruction.records + 1);
  std::vector<Instruction> begun, waits;
  for (int32_t unit = 0; unit < int32_t(plan.units.size()); ++unit) {
    begun.push_back({StageState{unit},
                     Phase::Forward,
                     -1,
                     {},
                     When::Every,
                     Stream::CopyToHost});
    begun.back().records = events;
    if (plan.accumulationSteps > 1)
      begun.back().when = When::First;
    waits.push_back({Wait{},
                     Phase::Backward,
                     -1,
                     {},
                     begun.back().when,
                     Stream::Compute,
                     {events++}});
  }
  auto end = std::find_if(plan.instructions.begin(), plan.instructions.end(),
                          [](const Instruction &instruction) {
                            return instruction.phase == Phase::Optimizer;
                          });
  plan.instructions.insert(end, waits.begin(), waits.end());
  plan.instructions.insert(plan.instructions.begin() + 1, begun.begin(),
                           begun.end());
}

void beginCollectives(Plan &plan) {
  EventId events = 0;
  std::vector<Instruction> result;
  for (Instruction &instruction : plan.instructions) {
    Stream stream = ownStream(instruction);
    bool begins = stream == Stream::AllGather ||
                  stream == Stream::ReduceScatter ||
                  stream == Stream::AllReduce ||
                  std::holds_alternative<OffloadActivation>(instruction.kind) ||
                  std::holds_alternative<ReloadActivation>(instruction.kind);
    if (const auto *call = std::get_if<Call>(&instruction.kind);
        call && call->op == "aten::t")
      plan.values[call->outs[0]].storage =
          std::get<TensorArg>(call->args[0].value).value;
    Phase phase = instruction.phase;
    When when = instruction.when;
    if (begins) {
      instruction.stream = stream;
      if (!result.empty()) {
        if (result.back().records == -1)
          result.back().records = events++;
        instruction.waits = {result.back().records};
      }
      instruction.records = events++;
    }
    std::vector<ValueId> frees;
    if (begins)
      frees = std::exchange(instruction.frees, {});
    result.push_back(std::move(instruction));
    if (begins)
      result.push_back({Wait{},
                        phase,
                        -1,
                        std::move(frees),
                        when,
                        Stream::Compute,
                        {events - 1}});
  }
  plan.instructions = std::move(result);
}

void accumulatePartial(Plan &plan) {
  plan.accumulationSteps = 2;
  std::vector<Instruction> instructions;
  for (Instruction &instruction : plan.instructions) {
    if (auto *reduce = std::get_if<AllReduce>(&instruction.kind)) {
      Accumulate sums{reduce->params, reduce->ins, {}};
      for (ValueId &in : reduce->ins) {
        plan.values.push_back(plan.values[size_t(in)]);
        in = ValueId(plan.values.size()) - 1;
      }
      sums.outs = reduce->ins;
      instruction.when = When::Last;
      instructions.push_back({std::move(sums), Phase::Backward, -1, {}});
    }
    instructions.push_back(std::move(instruction));
  }
  plan.instructions = std::move(instructions);
}

void offload(Plan &plan) {
  plan.units[0].cpuOffload = true;
  std::vector<Instruction> instructions;
  for (Instruction &instruction : plan.instructions) {
    if (auto *gather = std::get_if<AllGather>(&instruction.kind);
        gather && gather->unit == 0)
      instructions.push_back({CopyToDevice{0}, instruction.phase, -1, {}});
    if (auto *step = std::get_if<OptimizerStep>(&instruction.kind)) {
      CopyToHost copy{0, {step->params[0]}, {step->grads[0]}, {}};
      plan.values.push_back(TensorSpec(plan.values[size_t(step->grads[0])]));
      step->grads[0] = ValueId(plan.values.size()) - 1;
      copy.outs = {step->grads[0]};
      instructions.push_back({copy, Phase::Backward, -1, copy.ins});
    }
    instructions.push_back(std::move(instruction));
  }
  plan.instructions = std::move(instructions);
}

void offloadActivations(Plan &plan) {
  auto isOf = [](const Instruction &instruction, const char *op) {
    const auto *call = std::get_if<Call>(&instruction.kind);
    return call && call->op == op && instruction.phase == Phase::Forward;
  };
  for (const char *op : {"aten::mm", "aten::sub"}) {
    auto &list = plan.instructions;
    auto made = std::find_if(list.begin(), list.end(), [&](const auto &other) {
      return isOf(other, op);
    });
    ValueId value = std::get<Call>(made->kind).outs[0];
    size_t last = size_t(made - list.begin()), first = 0;
    for (size_t i = 0; i < list.size(); ++i) {
      std::vector<ValueId> operands = getOperands(list[i]);
      if (std::count(operands.begin(), operands.end(), value) == 0)
        continue;
      if (list[i].phase == Phase::Forward)
        last = i;
      else if (first == 0)
        first = i;
    }
    auto host = ValueId(plan.values.size());
    plan.values.push_back(TensorSpec(plan.values[size_t(value)]));
    ValueId again = host + 1;
    plan.values.push_back(TensorSpec(plan.values[size_t(value)]));
    for (size_t i = first; i < list.size(); ++i) {
      if (auto *call = std::get_if<Call>(&list[i].kind))
        for (Arg &arg : call->args)
          if (auto *tensor = std::get_if<TensorArg>(&arg.value);
              tensor && tensor->value == value)
            tensor->value = again;
      std::replace(list[i].frees.begin(), list[i].frees.end(), value, again);
    }
    for (Value &view : plan.values)
      if (view.storage == value)
        view.storage = again;
    list.insert(list.begin() + long(first),
                {ReloadActivation{host, {again}}, Phase::Backward, -1, {host}});
    list.insert(
        list.begin() + long(last) + 1,
        {OffloadActivation{{value}, host}, Phase::Forward, -1, {value}});
  }
}

void addEvaluation(Plan &plan) {
  std::map<ValueId, ValueId> copies;
  for (const Input &input : plan.inputs)
    copies[input.value] = input.value;
  auto rename = [&](ValueId &id) {
    if (id == -1)
      return;
    auto [it, isNew] = copies.try_emplace(id, ValueId(plan.values.size()));
    if (isNew)
      plan.values.push_back(TensorSpec(plan.values[size_t(id)]));
    id = it->second;
  };
  std::vector<bool> gathered(plan.units.size());
  for (Instruction instruction : plan.instructions) {
    if (instruction.phase != Phase::Forward)
      break;
    if (auto *call = std::get_if<Call>(&instruction.kind)) {
      for (Arg &arg : call->args)
        if (auto *tensor = std::get_if<TensorArg>(&arg.value))
          rename(tensor->value);
      for (ValueId &out : call->outs)
        rename(out);
    } else if (auto *read = std::get_if<ReadBuffer>(&instruction.kind)) {
      rename(read->out);
    } else if (auto *gather = std::get_if<AllGather>(&instruction.kind)) {
      for (ValueId &out : gather->outs)
        rename(out);
      gathered[size_t(gather->unit)] = true;
    } else if (auto *reshard = std::get_if<Reshard>(&instruction.kind)) {
      gathered[size_t(reshard->unit)] = false;
    }
    for (ValueId &value : instruction.frees)
      rename(value);
    plan.evaluation.push_back(std::move(instruction));
  }
  for (size_t u = 0; u < gathered.size(); ++u)
    if (gathered[u])
      plan.evaluation.push_back({Reshard{int32_t(u)}, Phase::Forward, 0, {}});
  plan.evaluationLoss = plan.loss;
  rename(plan.evaluationLoss);
}

} // namespace fsdp::test
