#include "sequenceSpans.h"

#include "sentence.h"

namespace trtllm_kvmap::plugin
{

Status checkSpans(SequenceSpans const& spans, int64_t numPositions, int64_t maxNumTokens, int64_t* numTokens)
{
    *numTokens = 0;
    for (int32_t sequence = 0; sequence < spans.numSequences; ++sequence)
    {
        int64_t const first = spans.first(sequence);
        int64_t const count = spans.count(sequence);
        if (first < 0 || count < 0 || first + count > numPositions)
        {
            return refuse("The span of sequence %d begins at %lld and has %lld tokens; positions 0 to %lld are there.",
                sequence, static_cast<long long>(first), static_cast<long long>(count),
                static_cast<long long>(numPositions - 1));
        }
        *numTokens += count;
    }
    if (*numTokens > maxNumTokens)
    {
        return refuse("The spans have %lld tokens in all; this engine maps at most %lld in one call.",
            static_cast<long long>(*numTokens), static_cast<long long>(maxNumTokens));
    }
    return Status{};
}

} // namespace trtllm_kvmap::plugin
