#include "kvMapPlugin.h"

#include "callWorkspace.h"
#include "mapCall.h"
#include "sentence.h"

#include <array>
#include <new>

namespace trtllm_kvmap::plugin
{

using nvinfer1::AsciiChar;
using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IExprBuilder;
using nvinfer1::IPluginCapability;
using nvinfer1::IPluginResourceContext;
using nvinfer1::IPluginV3;
using nvinfer1::IPluginV3OneBuildV2;
using nvinfer1::IPluginV3OneCore;
using nvinfer1::IPluginV3OneRuntime;
using nvinfer1::PluginCapabilityType;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorFormat;
using nvinfer1::TensorRTPhase;

KvMapPlugin::KvMapPlugin(KvMapConfig const& config, PackedMap const& map)
    : mConfig(config)
    , mMap(map)
    , mPorts(config, map)
    , mFields(&mConfig)
{
}

bool KvMapPlugin::isPaged() const
{
    return mConfig.mode == static_cast<int32_t>(Mode::kPAGED);
}

// ---- IPluginV3 -----------------------------------------------------------------------------------------------------

IPluginCapability* KvMapPlugin::getCapabilityInterface(PluginCapabilityType type) noexcept
{
    switch (type)
    {
    case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
    case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuildV2*>(this);
    case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

IPluginV3* KvMapPlugin::clone() noexcept
{
    return new (std::nothrow) KvMapPlugin(mConfig, mMap);
}

// ---- IPluginV3OneCore ----------------------------------------------------------------------------------------------

AsciiChar const* KvMapPlugin::getPluginName() const noexcept
{
    return kPLUGIN_NAME;
}

AsciiChar const* KvMapPlugin::getPluginVersion() const noexcept
{
    return kPLUGIN_VERSION;
}

AsciiChar const* KvMapPlugin::getPluginNamespace() const noexcept
{
    return kPLUGIN_NAMESPACE;
}

// ---- IPluginV3OneBuildV2 -------------------------------------------------------------------------------------------

int32_t KvMapPlugin::configurePlugin(
    DynamicPluginTensorDesc const* in, int32_t nbInputs, DynamicPluginTensorDesc const*, int32_t nbOutputs) noexcept
{
    if (nbOutputs != getNbOutputs())
    {
        return report(refuse("There are %d outputs; one is needed.", nbOutputs));
    }
    std::array<PluginTensorDesc, kMAX_PORTS> descs{};
    for (int32_t i = 0; i < nbInputs && i < kMAX_PORTS; ++i)
    {
        descs[i] = in[i].desc;
    }
    return report(mPorts.check(descs.data(), nbInputs));
}

int32_t KvMapPlugin::getOutputDataTypes(
    DataType* outputTypes, int32_t nbOutputs, DataType const*, int32_t nbInputs) const noexcept
{
    if (nbOutputs != getNbOutputs() || nbInputs != mPorts.numInputs())
    {
        return report(refuse(
            "There are %d inputs and %d outputs; %d and 1 are needed.", nbInputs, nbOutputs, mPorts.numInputs()));
    }
    outputTypes[0] = mPorts[mPorts.numInputs()].type;
    return 0;
}

int32_t KvMapPlugin::getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const*, int32_t,
    DimsExprs* outputs, int32_t nbOutputs, IExprBuilder& exprBuilder) noexcept
{
    if (nbOutputs != getNbOutputs() || nbInputs != mPorts.numInputs())
    {
        return report(refuse(
            "There are %d inputs and %d outputs; %d and 1 are needed.", nbInputs, nbOutputs, mPorts.numInputs()));
    }
    Dims const& dims = mPorts[mPorts.numInputs()].dims;
    outputs[0].nbDims = dims.nbDims;
    for (int32_t i = 0; i < dims.nbDims; ++i)
    {
        // What the map does not fix, it takes over: the sequences, and in dense mode the tokens of each.
        outputs[0].d[i]
            = dims.d[i] == kANY ? inputs[isPaged() ? kHOST_SPANS : kSOURCE_KV].d[i] : exprBuilder.constant(dims.d[i]);
    }
    return 0;
}

bool KvMapPlugin::supportsFormatCombination(
    int32_t pos, DynamicPluginTensorDesc const* inOut, int32_t nbInputs, int32_t nbOutputs) noexcept
{
    bool const known = nbInputs == mPorts.numInputs() && nbOutputs == getNbOutputs() && pos <= mPorts.numInputs();
    return known && inOut[pos].desc.format == TensorFormat::kLINEAR && mPorts.allowsType(pos, inOut[pos].desc.type);
}

int32_t KvMapPlugin::getNbOutputs() const noexcept
{
    return 1;
}

size_t KvMapPlugin::getWorkspaceSize(
    DynamicPluginTensorDesc const* inputs, int32_t, DynamicPluginTensorDesc const*, int32_t) const noexcept
{
    return workspaceBytes(mConfig, mMap, maxTokens(mConfig, inputs[kSOURCE_KV].max));
}

// ---- IPluginV3OneRuntime -------------------------------------------------------------------------------------------

int32_t KvMapPlugin::onShapeChange(
    PluginTensorDesc const* in, int32_t nbInputs, PluginTensorDesc const*, int32_t) noexcept
{
    return report(mPorts.check(in, nbInputs));
}

int32_t KvMapPlugin::enqueue(PluginTensorDesc const* inputDesc, PluginTensorDesc const*, void const* const* inputs,
    void* const* outputs, void* workspace, cudaStream_t stream) noexcept
{
    return report(enqueueMap(mConfig, mMap, mPorts, Tensors{inputDesc, inputs, outputs[0], workspace}, stream));
}

IPluginV3* KvMapPlugin::attachToContext(IPluginResourceContext*) noexcept
{
    return clone(); // an enqueue keeps no state, so a context needs nothing of its own
}

PluginFieldCollection const* KvMapPlugin::getFieldsToSerialize() noexcept
{
    return mFields.collection();
}

// ---- creator -------------------------------------------------------------------------------------------------------

IPluginV3* KvMapPluginCreator::createPlugin(
    AsciiChar const*, PluginFieldCollection const* fields, TensorRTPhase) noexcept
{
    KvMapConfig config;
    PackedMap map;
    if (report(readFields(fields, &config, &map)) != 0)
    {
        return nullptr;
    }
    return new (std::nothrow) KvMapPlugin(config, map);
}

PluginFieldCollection const* KvMapPluginCreator::getFieldNames() noexcept
{
    return mFields.collection();
}

AsciiChar const* KvMapPluginCreator::getPluginName() const noexcept
{
    return kPLUGIN_NAME;
}

AsciiChar const* KvMapPluginCreator::getPluginVersion() const noexcept
{
    return kPLUGIN_VERSION;
}

AsciiChar const* KvMapPluginCreator::getPluginNamespace() const noexcept
{
    return kPLUGIN_NAMESPACE;
}

} // namespace trtllm_kvmap::plugin

// ---- what TensorRT looks for in a plugin library ------------------------------------------------------------------

extern "C" __attribute__((visibility("default"))) void setLoggerFinder(nvinfer1::ILoggerFinder* finder)
{
    trtllm_kvmap::plugin::setLogFinder(finder);
}

extern "C" __attribute__((visibility("default"))) nvinfer1::IPluginCreatorInterface* const* getCreators(
    int32_t& nbCreators)
{
    static trtllm_kvmap::plugin::KvMapPluginCreator creator;
    static nvinfer1::IPluginCreatorInterface* const creators[] = {&creator};
    nbCreators = 1;
    return creators;
}
