//===- Fixtures.cpp - files and processes for tests -----------------------===//
#include "Support/Fixtures.h"
#include "Support/SamplePlan.h"
#include "fsdp/Plan/Messages.h"
#include "fsdp/Runtime/Collectives/Comm.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Files/SafeTensors.h"
#include "fsdp/Runtime/Memory/Layout.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/_chunk_cat.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include <sys/wait.h>
#include <unistd.h>

namespace fsdp::test {

ScratchDir::ScratchDir() {
  std::string name =
      (std::filesystem::temp_directory_path() / "fsdp-test-XXXXXX").string();
  if (!mkdtemp(name.data()))
    throw std::runtime_error("cannot make a scratch folder");
  path = name;
}

ScratchDir::~ScratchDir() { std::filesystem::remove_all(path); }

std::string errorOf(const std::function<void()> &run) {
  try {
    run();
  } catch (const runtime::InputError &error) {
    return error.what();
  }
  return "no error";
}

void writeText(const std::string &path, const std::string &text) {
  std::ofstream(path, std::ios::binary) << text;
}

std::string readText(const std::string &path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

void writeTensors(const std::string &path, const Tensors &tensors) {
  std::vector<runtime::NamedTensor> named;
  for (const auto &[name, tensor] : tensors) {
    plan::TensorSpec spec{tensor.sizes().vec(), plan::DType::Float32};
    if (tensor.scalar_type() == at::kLong)
      spec.dtype = plan::DType::Int64;
    else if (tensor.scalar_type() != at::kFloat)
      throw std::runtime_error("unexpected dtype");
    named.push_back({name,
                     spec,
                     {static_cast<const std::byte *>(tensor.const_data_ptr()),
                      tensor.nbytes()}});
  }
  runtime::OutputFile file(path);
  runtime::writeSafeTensors(file, named);
}

Tensors readTensors(const std::string &path) {
  Tensors tensors;
  runtime::SafeTensors file(path);
  for (const auto &[name, entry] : file.entries()) {
    at::Tensor tensor =
        at::empty(entry.spec.shape, runtime::scalarType(entry.spec.dtype));
    if (!entry.data.empty())
      std::memcpy(tensor.mutable_data_ptr(), entry.data.data(),
                  entry.data.size());
    tensors[name] = tensor;
  }
  return tensors;
}

Tensors sampleWeights() {
  at::Generator generator = at::detail::createCPUGenerator(1);
  auto make = [&](std::vector<int64_t> shape) {
    return at::randn(shape, generator, at::kFloat);
  };
  return {{"layer.w1", make({kFeatures, 7})},
          {"w2", make({7, kOutputs})},
          {"b", make({kOutputs})},
          {"scale", make({1})},
          {"shift", make({kOutputs})}};
}

Tensors sumAroundRing(const std::vector<Tensors> &grads,
                      const std::vector<std::vector<std::string>> &units) {
  Tensors sums;
  auto ranks = int64_t(grads.size());
  for (const std::vector<std::string> &unit : units) {
    std::vector<at::Tensor> messages;
    for (const Tensors &own : grads) {
      std::vector<at::Tensor> parts;
      for (const std::string &name : unit)
        parts.push_back(own.at(name));
      messages.push_back(at::_chunk_cat(parts, 0, ranks).flatten());
    }
    at::Tensor sum = at::empty_like(messages[0]);
    int64_t piece =
        plan::ringPiece(sum.numel(), int64_t(sum.element_size()), ranks);
    for (int64_t c = 0; c * piece < sum.numel(); ++c) {
      at::Tensor total;
      for (int64_t k = 1; k <= ranks; ++k) {
        at::Tensor term = messages[size_t((c - k + ranks) % ranks)].slice(
            0, c * piece, (c + 1) * piece);
        total = total.defined() ? at::add(total, term) : term;
      }
      sum.slice(0, c * piece, (c + 1) * piece).copy_(total);
    }
    at::Tensor rows = sum.view({ranks, -1});
    int64_t begin = 0;
    for (const std::string &name : unit) {
      const at::Tensor &grad = grads[0].at(name);
      std::vector<at::Tensor> parts;
      for (const at::Tensor &chunk : grad.chunk(ranks))
        parts.push_back(
            rows[int64_t(parts.size())].narrow(0, begin, chunk.numel()));
      sums[name] = at::cat(parts).view(grad.sizes());
      begin += grad.chunk(ranks)[0].numel();
    }
  }
  return sums;
}

Tensors sampleData(int64_t samples) {
  at::Generator generator = at::detail::createCPUGenerator(2);
  return {{"x", at::randn({samples, kFeatures}, generator, at::kFloat)},
          {"y", at::randn({samples, kOutputs}, generator, at::kFloat)}};
}

void writeSample(const ScratchDir &dir, const plan::Plan &plan,
                 int64_t samples) {
  writeText(dir / "plan.json", plan::printPlan(plan));
  writeTensors(dir / "model.safetensors", sampleWeights());
  writeTensors(dir / "data.safetensors", sampleData(samples));
}

ToolResult runTool(const std::vector<std::string> &args,
                   const std::map<std::string, std::string> &environment) {
  ScratchDir dir;
  std::string errPath = dir / "stderr";
  std::vector<std::string> command = {FSDP_RUN_PATH};
  command.insert(command.end(), args.begin(), args.end());
  std::vector<char *> argv;
  for (std::string &arg : command)
    argv.push_back(arg.data());
  argv.push_back(nullptr);

  auto begin = std::chrono::steady_clock::now();
  pid_t pid = fork();
  if (pid == 0) {
    setpgid(0, 0);
    for (const auto &[name, value] : environment)
      setenv(name.c_str(), value.c_str(), 1);
    if (!std::freopen(errPath.c_str(), "w", stderr))
      _exit(126);
    execv(argv[0], argv.data());
    _exit(127);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  ToolResult result;
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  result.seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
          .count();
  result.err = readText(errPath);
  if (kill(-pid, 0) == 0) {
    ADD_FAILURE() << "processes are left behind";
    kill(-pid, SIGKILL);
  }
  return result;
}

std::vector<at::Tensor> await(const runtime::Collective &collective) {
  collective.wait();
  return collective.results;
}

bool isRounded(const at::Tensor &got, const at::Tensor &exact,
               const at::Tensor &magnitude, int64_t roundings) {
  auto dtype = got.scalar_type();
  double epsilon = dtype == at::kBFloat16 ? 0x1p-7
                   : dtype == at::kFloat  ? 0x1p-23
                                          : 0;
  EXPECT_GT(epsilon, 0) << "no epsilon known of " << dtype;
  double share = double(roundings) * epsilon / 2;
  at::Tensor error = got.to(at::kDouble).sub(exact).abs();
  return error.le(magnitude.mul(share / (1 - share))).all().item<bool>();
}

std::vector<std::string> forkRanks(int64_t ranks,
                                   const std::function<void(int64_t)> &body) {
  std::vector<std::pair<pid_t, int>> children;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    int ends[2];
    if (pipe(ends) != 0)
      throw std::runtime_error("cannot make a pipe");
    pid_t pid = fork();
    if (pid == 0) {
      close(ends[0]);
      // OpenMP's threads, where the parent had any, are not in the child.
      at::set_num_threads(1);
      std::string message;
      try {
        body(rank);
      } catch (const std::exception &error) {
        message = error.what();
        message = message.empty() ? "unnamed error" : message;
      }
      auto written = write(ends[1], message.data(), message.size());
      _exit(written == ssize_t(message.size()) ? 0 : 1);
    }
    close(ends[1]);
    children.emplace_back(pid, ends[0]);
  }
  std::vector<std::string> messages;
  for (auto [pid, end] : children) {
    std::string message;
    char buffer[4096];
    for (ssize_t size; (size = read(end, buffer, sizeof(buffer))) > 0;)
      message.append(buffer, size_t(size));
    close(end);
    int status = 0;
    waitpid(pid, &status, 0);
    if (WIFSIGNALED(status))
      message += "killed by signal " + std::to_string(WTERMSIG(status));
    else if (WEXITSTATUS(status) != 0)
      message += "exit status " + std::to_string(WEXITSTATUS(status));
    messages.push_back(message);
  }
  return messages;
}

} // namespace fsdp::test
