//===- RankFiles.cpp - what each rank has measured, on rank 0 -------------===//
#include "fsdp/Runtime/RankFiles.h"
#include "fsdp/Runtime/Error.h"

#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

namespace fsdp::runtime {

std::string readFile(const std::string &path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  if (!file || !(text << file.rdbuf()))
    throw InputError(path + ": cannot be read");
  return text.str();
}

void writeFile(const std::string &path, const std::string &text) {
  std::ofstream file(path, std::ios::binary);
  if (!(file << text) || !file.flush())
    throw InputError(path + ": cannot be written");
}

std::vector<std::vector<double>> gatherByFiles(Comm &comm,
                                               const std::vector<double> &own,
                                               const std::string &path) {
  auto partPath = [&](int64_t rank) {
    return path + ".rank" + std::to_string(rank);
  };
  writeFile(partPath(comm.rank()),
            std::string(reinterpret_cast<const char *>(own.data()),
                        own.size() * sizeof(double)));
  comm.barrier();
  std::vector<std::vector<double>> all;
  if (comm.rank() != 0)
    return all;
  for (int64_t rank = 0; rank < comm.worldSize(); ++rank) {
    std::string part = readFile(partPath(rank));
    std::remove(partPath(rank).c_str());
    if (part.size() != own.size() * sizeof(double))
      throw InputError(partPath(rank) + ": expected " +
                       std::to_string(own.size()) + " numbers");
    all.emplace_back(own.size());
    std::memcpy(all.back().data(), part.data(), part.size());
  }
  return all;
}

} // namespace fsdp::runtime
