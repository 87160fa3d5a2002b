// Drives the KvMap plugin through TensorRT's own interfaces, as a builder, a serialised engine and a context would, and
// hands every answer to Python (harness.py) through plain C functions.
//
// The registry is that of the TensorRT runtime given to openRegistry. Its virtual table changes with the major version:
// build this with headers of the runtime's major.
#include <NvInfer.h>

#include <dlfcn.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

using namespace nvinfer1;

namespace
{

// A dimension: a number, or the name of one that only a run knows.
class Dim final : public IDimensionExpr, public apiv::VDimensionExpr
{
public:
    explicit Dim(int64_t value, std::string name = {})
        : mValue(value)
        , mName(std::move(name))
    {
        mImpl = this;
    }

    bool isConstant() const override
    {
        return mName.empty();
    }

    int64_t getConstantValue() const override
    {
        return mValue;
    }

    bool isSizeTensor() const override
    {
        return false;
    }

    std::string text() const
    {
        return mName.empty() ? std::to_string(mValue) : mName;
    }

private:
    int64_t mValue;
    std::string mName;
};

class Dimensions final : public IExprBuilder, public apiv::VExprBuilder
{
public:
    Dimensions()
    {
        mImpl = this;
    }

    Dim const* symbol(std::string name)
    {
        return keep(new Dim(-1, std::move(name)));
    }

    IDimensionExpr const* constant(int64_t value) override
    {
        return keep(new Dim(value));
    }

    IDimensionExpr const* operation(
        DimensionOperation op, IDimensionExpr const& first, IDimensionExpr const& second) override
    {
        auto const text = [](IDimensionExpr const& dim) { return static_cast<Dim const&>(dim).text(); };
        return symbol("(" + text(first) + " op" + std::to_string(static_cast<int>(op)) + " " + text(second) + ")");
    }

    IDimensionExpr const* declareSizeTensor(int32_t, IDimensionExpr const& opt, IDimensionExpr const&) override
    {
        return &opt;
    }

private:
    Dim const* keep(Dim* dim)
    {
        mKept.emplace_back(dim);
        return dim;
    }

    std::vector<std::unique_ptr<Dim>> mKept;
};

IPluginV3OneBuildV2* buildOf(IPluginV3* plugin)
{
    return static_cast<IPluginV3OneBuildV2*>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
}

IPluginV3OneRuntime* runtimeOf(IPluginV3* plugin)
{
    return static_cast<IPluginV3OneRuntime*>(plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
}

void copyText(std::string const& text, char* out, int32_t size)
{
    std::snprintf(out, static_cast<size_t>(size), "%s", text.c_str());
}

IPluginRegistry* gRegistry = nullptr;
IPluginCreatorInterface* gAlone = nullptr; // of a library that was opened without a registry

} // namespace

extern "C"
{

// One tensor of a call: TensorRT's type and format, up to 8 dimensions (-1: dynamic).
struct Tensor
{
    int32_t type;
    int32_t format;
    int32_t rank;
    int64_t dims[8];
};

static PluginTensorDesc descOf(Tensor const& tensor)
{
    PluginTensorDesc desc{};
    desc.type = static_cast<DataType>(tensor.type);
    desc.format = static_cast<TensorFormat>(tensor.format);
    desc.dims.nbDims = tensor.rank;
    for (int32_t i = 0; i < tensor.rank; ++i)
    {
        desc.dims.d[i] = tensor.dims[i];
    }
    return desc;
}

static std::vector<DynamicPluginTensorDesc> dynamicDescs(Tensor const* tensors, int32_t count)
{
    std::vector<DynamicPluginTensorDesc> descs(count);
    for (int32_t i = 0; i < count; ++i)
    {
        descs[i].desc = descOf(tensors[i]);
        descs[i].min = descs[i].opt = descs[i].max = descs[i].desc.dims;
    }
    return descs;
}

// The runtime's version, or -1 with a sentence in `error`.
int32_t openRegistry(char const* runtime, char const* plugin, char* error, int32_t size)
{
    void* const library = dlopen(runtime, RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr)
    {
        copyText(dlerror(), error, size);
        return -1;
    }
    gRegistry = reinterpret_cast<IPluginRegistry* (*) ()>(dlsym(library, "getPluginRegistry"))();
    if (gRegistry->loadLibrary(plugin) == nullptr)
    {
        copyText("the registry refused the library", error, size);
        return -1;
    }
    return reinterpret_cast<int32_t (*)()>(dlsym(library, "getInferLibVersion"))();
}

// The creator that a plugin library itself names, without a TensorRT runtime. 0, or -1 and a sentence.
int32_t openAlone(char const* plugin, char* error, int32_t size)
{
    void* const library = dlopen(plugin, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
    {
        copyText(dlerror(), error, size);
        return -1;
    }
    using GetCreators = IPluginCreatorInterface* const* (*) (int32_t&);
    auto const getCreators = reinterpret_cast<GetCreators>(dlsym(library, "getCreators"));
    int32_t count = 0;
    IPluginCreatorInterface* const* const creators = getCreators ? getCreators(count) : nullptr;
    if (count != 1)
    {
        copyText("the library names no creator, or several", error, size);
        return -1;
    }
    gAlone = creators[0];
    return 0;
}

int32_t headerMajor()
{
    return NV_TENSORRT_MAJOR;
}

IPluginCreatorV3One* findCreator(char const* name, char const* version, char const* nameSpace)
{
    IPluginCreatorInterface* const found = gAlone ? gAlone : gRegistry->getCreator(name, version, nameSpace);
    bool const isV3 = found != nullptr && std::string(found->getInterfaceInfo().kind) == "PLUGIN CREATOR_V3ONE";
    return isV3 ? static_cast<IPluginCreatorV3One*>(found) : nullptr;
}

PluginFieldCollection const* creatorFields(IPluginCreatorV3One* creator)
{
    return creator->getFieldNames();
}

int32_t fieldCount(PluginFieldCollection const* fields)
{
    return fields->nbFields;
}

PluginField const* fieldAt(PluginFieldCollection const* fields, int32_t index)
{
    return fields->fields + index;
}

char const* fieldName(PluginField const* field)
{
    return field->name;
}

int32_t fieldType(PluginField const* field)
{
    return static_cast<int32_t>(field->type);
}

int32_t fieldLength(PluginField const* field)
{
    return field->length;
}

void const* fieldData(PluginField const* field)
{
    return field->data;
}

IPluginV3* createPlugin(IPluginCreatorV3One* creator, int32_t count, char const* const* names, int32_t const* types,
    int32_t const* lengths, void const* const* data, int32_t phase)
{
    std::vector<PluginField> fields;
    for (int32_t i = 0; i < count; ++i)
    {
        fields.emplace_back(names[i], data[i], static_cast<PluginFieldType>(types[i]), lengths[i]);
    }
    PluginFieldCollection const collection{count, fields.data()};
    return creator->createPlugin("kvMap", &collection, static_cast<TensorRTPhase>(phase));
}

void destroyPlugin(IPluginV3* plugin)
{
    delete plugin;
}

IPluginV3* clonePlugin(IPluginV3* plugin)
{
    return plugin->clone();
}

IPluginV3* attachPlugin(IPluginV3* plugin)
{
    return runtimeOf(plugin)->attachToContext(nullptr);
}

// "core name/version/namespace; kinds of the capabilities".
void describePlugin(IPluginV3* plugin, char* out, int32_t size)
{
    auto* const core = static_cast<IPluginV3OneCore*>(plugin->getCapabilityInterface(PluginCapabilityType::kCORE));
    std::string text
        = std::string(core->getPluginName()) + "/" + core->getPluginVersion() + "/" + core->getPluginNamespace();
    for (IPluginCapability* capability : {static_cast<IPluginCapability*>(core),
             static_cast<IPluginCapability*>(buildOf(plugin)), static_cast<IPluginCapability*>(runtimeOf(plugin))})
    {
        InterfaceInfo const info = capability->getInterfaceInfo();
        text += std::string("; ") + info.kind + " v" + std::to_string(info.major) + "." + std::to_string(info.minor);
    }
    copyText(text, out, size);
}

int32_t outputCount(IPluginV3* plugin)
{
    return buildOf(plugin)->getNbOutputs();
}

int32_t outputType(IPluginV3* plugin, Tensor const* inputs, int32_t count)
{
    std::vector<DataType> types;
    for (int32_t i = 0; i < count; ++i)
    {
        types.push_back(static_cast<DataType>(inputs[i].type));
    }
    DataType type{};
    int32_t const refused = buildOf(plugin)->getOutputDataTypes(&type, 1, types.data(), count);
    return refused ? -refused : static_cast<int32_t>(type);
}

// "a, b, c": numbers, and "input.axis" where a dimension is taken over. Returns what the plugin returned.
int32_t outputShape(IPluginV3* plugin, Tensor const* inputs, int32_t count, char* out, int32_t size)
{
    Dimensions dimensions;
    std::vector<DimsExprs> shapes(count);
    for (int32_t i = 0; i < count; ++i)
    {
        shapes[i].nbDims = inputs[i].rank;
        for (int32_t axis = 0; axis < inputs[i].rank; ++axis)
        {
            std::string const name = std::to_string(i) + "." + std::to_string(axis);
            shapes[i].d[axis] = inputs[i].dims[axis] < 0 ? static_cast<IDimensionExpr const*>(dimensions.symbol(name))
                                                         : dimensions.constant(inputs[i].dims[axis]);
        }
    }
    DimsExprs output{};
    int32_t const refused = buildOf(plugin)->getOutputShapes(shapes.data(), count, nullptr, 0, &output, 1, dimensions);
    std::string text;
    for (int32_t axis = 0; !refused && axis < output.nbDims; ++axis)
    {
        text += (axis ? ", " : "") + static_cast<Dim const*>(output.d[axis])->text();
    }
    copyText(text, out, size);
    return refused;
}

// `tensors` are the inputs, then the output.
int32_t supports(IPluginV3* plugin, int32_t position, Tensor const* tensors, int32_t numInputs)
{
    auto const descs = dynamicDescs(tensors, numInputs + 1);
    return buildOf(plugin)->supportsFormatCombination(position, descs.data(), numInputs, 1);
}

int32_t configure(IPluginV3* plugin, Tensor const* tensors, int32_t numInputs)
{
    auto const descs = dynamicDescs(tensors, numInputs + 1);
    return buildOf(plugin)->configurePlugin(descs.data(), numInputs, descs.data() + numInputs, 1);
}

uint64_t workspaceSize(IPluginV3* plugin, Tensor const* tensors, int32_t numInputs)
{
    auto const descs = dynamicDescs(tensors, numInputs + 1);
    return buildOf(plugin)->getWorkspaceSize(descs.data(), numInputs, descs.data() + numInputs, 1);
}

int32_t aliasedInput(IPluginV3* plugin)
{
    return buildOf(plugin)->getAliasedInput(0);
}

PluginFieldCollection const* serialisedFields(IPluginV3* plugin)
{
    return runtimeOf(plugin)->getFieldsToSerialize();
}

int32_t changeShape(IPluginV3* plugin, Tensor const* tensors, int32_t numInputs)
{
    std::vector<PluginTensorDesc> descs;
    for (int32_t i = 0; i <= numInputs; ++i)
    {
        descs.push_back(descOf(tensors[i]));
    }
    return runtimeOf(plugin)->onShapeChange(descs.data(), numInputs, descs.data() + numInputs, 1);
}

int32_t enqueue(IPluginV3* plugin, Tensor const* tensors, int32_t numInputs, void const* const* inputs, void* output,
    void* workspace)
{
    std::vector<PluginTensorDesc> descs;
    for (int32_t i = 0; i <= numInputs; ++i)
    {
        descs.push_back(descOf(tensors[i]));
    }
    return runtimeOf(plugin)->enqueue(descs.data(), descs.data() + numInputs, inputs, &output, workspace, nullptr);
}

} // extern "C"
