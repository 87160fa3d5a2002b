// Making a Status: a code and one sentence, without allocation.
#pragma once

#include "trtllm_kvmap/mapKvCache.h"

#include <cstdarg>
#include <cstdio>

namespace trtllm_kvmap
{

inline Status okStatus()
{
    return Status{};
}

inline bool isOk(Status const& status)
{
    return status.code == StatusCode::kOK;
}

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
inline Status makeStatus(StatusCode code, char const* format, ...)
{
    Status status{};
    status.code = code;
    std::va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(status.sentence, sizeof status.sentence, format, arguments);
    va_end(arguments);
    return status;
}

} // namespace trtllm_kvmap
