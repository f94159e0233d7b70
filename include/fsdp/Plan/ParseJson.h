//===- ParseJson.h - JSON text to a tree, bounded -------------------------===//
#ifndef FSDP_PLAN_PARSEJSON_H
#define FSDP_PLAN_PARSEJSON_H

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <string_view>

namespace fsdp::plan {

using Json = nlohmann::json;

/// Of a file that holds JSON.
inline constexpr uint64_t kMaxJsonBytes = uint64_t(1) << 30;

/// The tree of a JSON text. Throws PlanError, beginning with `origin`, for text
/// that is not JSON, is nested deeper than 64, or has a key twice in one object
/// or an integer beyond 64 bits.
Json parseJson(std::string_view text, const std::string &origin);

} // namespace fsdp::plan

#endif // FSDP_PLAN_PARSEJSON_H
