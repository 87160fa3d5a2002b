#include "sentence.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>

namespace trtllm_kvmap::plugin
{

namespace
{

std::atomic<nvinfer1::ILoggerFinder*> gFinder{nullptr};

} // namespace

Status refuse(char const* format, ...)
{
    Status status{};
    status.code = StatusCode::kINVALID_ARGUMENT;
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(status.sentence, sizeof(status.sentence), format, arguments);
    va_end(arguments);
    return status;
}

int32_t report(Status const& status) noexcept
{
    if (status.code == StatusCode::kOK)
    {
        return 0;
    }
    char text[sizeof(status.sentence) + 16];
    std::snprintf(text, sizeof(text), "KvMap: %s", status.sentence);
    nvinfer1::ILoggerFinder* const finder = gFinder.load();
    nvinfer1::ILogger* const logger = finder ? finder->findLogger() : nullptr;
    if (logger)
    {
        logger->log(nvinfer1::ILogger::Severity::kERROR, text);
    }
    else
    {
        std::fprintf(stderr, "%s\n", text);
    }
    return static_cast<int32_t>(status.code);
}

void setLogFinder(nvinfer1::ILoggerFinder* finder) noexcept
{
    gFinder.store(finder);
}

} // namespace trtllm_kvmap::plugin
