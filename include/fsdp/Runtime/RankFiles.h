//===- RankFiles.h - what each rank has measured, on rank 0 ---------------===//
#ifndef FSDP_RUNTIME_RANKFILES_H
#define FSDP_RUNTIME_RANKFILES_H

#include "fsdp/Runtime/Comm.h"

#include <string>
#include <vector>

namespace fsdp::runtime {

/// The bytes of a file. Throws InputError, as the others here.
std::string readFile(const std::string &path);
void writeFile(const std::string &path, const std::string &text);

/// Every rank's numbers, as many of each, on rank 0; nothing on the others.
/// Collective. Each rank writes a file beside `path`, which rank 0 removes: the
/// ranks see the same files.
std::vector<std::vector<double>> gatherByFiles(Comm &comm,
                                               const std::vector<double> &own,
                                               const std::string &path);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_RANKFILES_H
