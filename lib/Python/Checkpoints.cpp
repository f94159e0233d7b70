//===- Checkpoints.cpp - checkpoints for the module of Python -------------===//
#include "Checkpoints.h"

#include "fsdp/Runtime/Launch/CallerCheckpoints.h"
#include "fsdp/Runtime/Launch/OpenTogether.h"

#include <torch/csrc/utils/pybind.h>

#include <ATen/Parallel.h>

#include <optional>
#include <tuple>

namespace py = pybind11;
using namespace fsdp;
using namespace fsdp::runtime;

namespace {

/// name, shape of the whole tensor, offsets of the box, the box.
using Box = std::tuple<std::string, std::vector<int64_t>, std::vector<int64_t>,
                       at::Tensor>;

CallerTensor tensorOf(const Box &box) {
  const auto &[name, shape, offsets, data] = box;
  return {name, shape, offsets, data};
}

std::vector<CallerTensor> tensorsOf(const std::vector<Box> &boxes) {
  std::vector<CallerTensor> tensors;
  for (const Box &box : boxes)
    tensors.push_back(tensorOf(box));
  return tensors;
}

/// Loops in Python feed their own data.
constexpr char kData[] = "a loop's own";

RunState stateOf(int64_t worldSize, bool isGpu, const py::dict &given) {
  RunState state;
  state.step = given["step"].cast<int64_t>();
  state.samples = given["samples"].cast<int64_t>();
  state.updates = given["updates"].cast<int64_t>();
  state.seed = given["seed"].cast<uint64_t>();
  state.plan = given["plan"].cast<std::string>();
  state.data = kData;
  state.worldSize = worldSize;
  if (!given["scaler"].is_none()) {
    auto [scale, tracker] = given["scaler"].cast<std::pair<double, int64_t>>();
    state.scaler = {scale, tracker};
  }
  state.environment = environmentOfBits(isGpu, at::get_num_threads());
  return state;
}

/// Of the checkpoint that is open.
py::dict describe(const CallerCheckpoints &checkpoints) {
  const NativeCheckpoint &checkpoint = checkpoints.opened();
  const Manifest &manifest = checkpoint.manifest();
  py::dict tensors;
  for (const auto &[name, spec] : manifest.tensors)
    tensors[name.c_str()] =
        py::make_tuple(std::string(plan::dtypeName(spec.dtype)), spec.shape);
  const RunState &state = manifest.state;
  py::dict result;
  result["path"] = checkpoint.path();
  result["step"] = state.step;
  result["samples"] = state.samples;
  result["updates"] = state.updates;
  result["world_size"] = state.worldSize;
  result["seed"] = state.seed;
  result["scaler"] =
      state.scaler ? py::object(py::make_tuple(state.scaler->scale,
                                               state.scaler->growthTracker))
                   : py::none();
  result["tensors"] = tensors;
  return result;
}

/// What differs from a run of so many ranks with this plan; empty: not known.
std::string differences(const CallerCheckpoints &checkpoints, int64_t worldSize,
                        bool isGpu, const std::string &plan) {
  const RunState &then = checkpoints.opened().manifest().state;
  RunState now;
  now.worldSize = worldSize;
  now.plan = plan.empty() ? then.plan : plan;
  now.data = then.data;
  now.environment = environmentOfBits(isGpu, at::get_num_threads());
  return compareRuns(then, now);
}

} // namespace

void bindCheckpoints(py::module_ &m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<CallerCheckpoints>(m, "Checkpoints")
      .def(py::init<Rendezvous &>(), Release())
      .def("save",
           [](CallerCheckpoints &self, const std::string &folder,
              const py::dict &state, int64_t worldSize, bool isGpu,
              const std::map<std::string, std::string> &aliases,
              const std::vector<Box> &chunks, const std::vector<Box> &own,
              int64_t keep) {
             RunState run = stateOf(worldSize, isGpu, state);
             std::vector<CallerTensor> parts = tensorsOf(chunks),
                                       whole = tensorsOf(own);
             py::gil_scoped_release release;
             return self.save(folder, run, aliases, parts, whole, keep);
           })
      // Why newer ones were skipped, and the checkpoint or None.
      .def("open",
           [](CallerCheckpoints &self, const std::string &path) {
             std::vector<std::string> skipped;
             bool found = false;
             {
               py::gil_scoped_release release;
               found = self.open(path, skipped);
             }
             return py::make_tuple(skipped, found ? py::object(describe(self))
                                                  : py::none());
           })
      .def("read", [](const CallerCheckpoints &self,
                      const Box &to) { self.read(tensorOf(to)); })
      .def("check", [](const CallerCheckpoints &self,
                       const Box &tensor) { self.check(tensorOf(tensor)); })
      .def("differences", &differences)
      .def_static("check_types",
                  [](const std::vector<Box> &boxes) {
                    CallerCheckpoints::checkTypes(tensorsOf(boxes));
                  })
      .def_static("check_names",
                  [](const std::vector<std::string> &names) {
                    for (const std::string &name : names)
                      if (std::string why = whyReserved(name); !why.empty())
                        throw py::value_error(why);
                  })
      .def("go_on", &CallerCheckpoints::goOn)
      .def("close", &CallerCheckpoints::close);
}
