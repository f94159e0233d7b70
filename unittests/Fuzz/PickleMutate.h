//===- PickleMutate.h - pickles from pickles ------------------------------===//
#ifndef FSDP_UNITTESTS_FUZZ_PICKLEMUTATE_H
#define FSDP_UNITTESTS_FUZZ_PICKLEMUTATE_H

#include "Fuzz.h"

#include <string>
#include <string_view>

namespace fsdp::fuzz {

/// Changes a pickle in its instructions: removes, repeats, exchanges them, puts
/// those of another place, and extreme numbers. What is none is changed in its
/// bytes.
std::string mutatePickle(std::string_view pickle, Random &random);

} // namespace fsdp::fuzz

#endif // FSDP_UNITTESTS_FUZZ_PICKLEMUTATE_H
