//===- GraphReader.h - TorchScript's textual IR to calls ------------------===//
//
// What a graph of model.pt says of its calls, with what the operators' schemas
// add: aliasing, mutation and randomness. The schemas of operators that
// LibTorch does not have stand in capture.json.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_IMPORT_GRAPHREADER_H
#define FSDP_IMPORT_GRAPHREADER_H

#include "fsdp/Import/Capture.h"

#include <string>
#include <vector>

namespace fsdp {

/// Reads `text`, a graph with the given number of inputs, and completes
/// `calls`, which are those of capture.json in the same order. Returns the
/// elements of its result tuple. Throws CaptureError that names the file `path`
/// and its `record`.
std::vector<plan::ValueId> readGraph(const std::string &path,
                                     const char *record,
                                     const std::string &text, size_t inputs,
                                     std::vector<CapturedCall> &calls);

} // namespace fsdp

#endif // FSDP_IMPORT_GRAPHREADER_H
