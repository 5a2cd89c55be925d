"""The messages of the Open Inference Protocol over gRPC, and a model's configuration; see core/protobuf.py."""

from __future__ import annotations

from functools import cache
from typing import Any

from cotenant.core import protobuf

PACKAGE = "inference"
SERVICE = "/inference.GRPCInferenceService/"

_MESSAGES = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "bool live 1",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "bool ready 1",
    "ModelReadyRequest": "string name 1, string version 2",
    "ModelReadyResponse": "bool ready 1",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "string name 1, string version 2, [string] extensions 3",
    "ModelMetadataRequest": "string name 1, string version 2",
    "TensorMetadata": "string name 1, string datatype 2, [int64] shape 3",
    "ModelMetadataResponse": (
        "string name 1, [string] versions 2, string platform 3, [TensorMetadata] inputs 4, [TensorMetadata] outputs 5"
    ),
    "InferParameter": (
        "bool bool_param 1, int64 int64_param 2, string string_param 3, double double_param 4, uint64 uint64_param 5"
    ),
    "InferTensorContents": (
        "[bool] bool_contents 1, [int32] int_contents 2, [int64] int64_contents 3, [uint32] uint_contents 4, "
        "[uint64] uint64_contents 5, [float] fp32_contents 6, [double] fp64_contents 7, [bytes] bytes_contents 8"
    ),
    "InferInputTensor": (
        "string name 1, string datatype 2, [int64] shape 3, {InferParameter} parameters 4, "
        "InferTensorContents contents 5"
    ),
    "InferRequestedOutputTensor": "string name 1, {InferParameter} parameters 2",
    "ModelInferRequest": (
        "string model_name 1, string model_version 2, string id 3, {InferParameter} parameters 4, "
        "[InferInputTensor] inputs 5, [InferRequestedOutputTensor] outputs 6, [bytes] raw_input_contents 7"
    ),
    "InferOutputTensor": (
        "string name 1, string datatype 2, [int64] shape 3, {InferParameter} parameters 4, "
        "InferTensorContents contents 5"
    ),
    "ModelInferResponse": (
        "string model_name 1, string model_version 2, string id 3, {InferParameter} parameters 4, "
        "[InferOutputTensor] outputs 5, [bytes] raw_output_contents 6"
    ),
    "ModelStreamInferResponse": "string error_message 1, ModelInferResponse infer_response 2",
    "ModelConfigRequest": "string name 1, string version 2",
    "ModelConfigResponse": "ModelConfig config 1",
    "ModelStatisticsRequest": "string name 1, string version 2",
    "StatisticDuration": "uint64 count 1, uint64 ns 2",
    "InferStatistics": (
        "StatisticDuration success 1, StatisticDuration fail 2, StatisticDuration queue 3, "
        "StatisticDuration compute_input 4, StatisticDuration compute_infer 5, StatisticDuration compute_output 6, "
        "StatisticDuration cache_hit 7, StatisticDuration cache_miss 8"
    ),
    "InferBatchStatistics": (
        "uint64 batch_size 1, StatisticDuration compute_input 2, StatisticDuration compute_infer 3, "
        "StatisticDuration compute_output 4"
    ),
    "ModelStatistics": (
        "string name 1, string version 2, uint64 last_inference 3, uint64 inference_count 4, "
        "uint64 execution_count 5, InferStatistics inference_stats 6, [InferBatchStatistics] batch_stats 7"
    ),
    "ModelStatisticsResponse": "[ModelStatistics] model_stats 1",
    "RepositoryIndexRequest": "string repository_name 1, bool ready 2",
    "RepositoryIndexResponse.ModelIndex": "string name 1, string version 2, string state 3, string reason 4",
    "RepositoryIndexResponse": "[RepositoryIndexResponse.ModelIndex] models 1",
    "ModelRepositoryParameter": "bool bool_param 1, int64 int64_param 2, string string_param 3, bytes bytes_param 4",
    "RepositoryModelLoadRequest": (
        "string repository_name 1, string model_name 2, {ModelRepositoryParameter} parameters 3"
    ),
    "RepositoryModelLoadResponse": "",
    "RepositoryModelUnloadRequest": (
        "string repository_name 1, string model_name 2, {ModelRepositoryParameter} parameters 3"
    ),
    "RepositoryModelUnloadResponse": "",
    "SystemSharedMemoryStatusRequest": "string name 1",
    "SystemSharedMemoryStatusResponse.RegionStatus": "string name 1, string key 2, uint64 offset 3, uint64 byte_size 4",
    "SystemSharedMemoryStatusResponse": "{SystemSharedMemoryStatusResponse.RegionStatus} regions 1",
    "SystemSharedMemoryRegisterRequest": "string name 1, string key 2, uint64 offset 3, uint64 byte_size 4",
    "SystemSharedMemoryRegisterResponse": "",
    "SystemSharedMemoryUnregisterRequest": "string name 1",
    "SystemSharedMemoryUnregisterResponse": "",
    "CudaSharedMemoryStatusRequest": "string name 1",
    "CudaSharedMemoryStatusResponse.RegionStatus": "string name 1, uint64 device_id 2, uint64 byte_size 3",
    "CudaSharedMemoryStatusResponse": "{CudaSharedMemoryStatusResponse.RegionStatus} regions 1",
    "CudaSharedMemoryRegisterRequest": "string name 1, bytes raw_handle 2, int64 device_id 3, uint64 byte_size 4",
    "CudaSharedMemoryRegisterResponse": "",
    "CudaSharedMemoryUnregisterRequest": "string name 1",
    "CudaSharedMemoryUnregisterResponse": "",
    # The messages of config.pbtxt, with the fields that matter for models that can run here. Fields of ensembles,
    # sequences and operators are left out, so models with these fields are refused.
    "ModelConfig": (
        "string name 1, string platform 2, ModelVersionPolicy version_policy 3, int32? max_batch_size 4, "
        "[ModelInput] input 5, [ModelOutput] output 6, [ModelInstanceGroup] instance_group 7, "
        "string default_model_filename 8, {string} metric_tags 10, ModelDynamicBatching dynamic_batching 11, "
        "ModelOptimizationPolicy optimization 12, {ModelParameter} parameters 14, [ModelWarmup] model_warmup 16, "
        "string backend 17, ModelTransactionPolicy model_transaction_policy 19, ModelResponseCache response_cache 24"
    ),
    "ModelInput": (
        "string name 1, DataType data_type 2, ModelInput.Format format 3, [int64] dims 4, "
        "ModelTensorReshape reshape 5, bool is_shape_tensor 6, bool allow_ragged_batch 7, bool optional 8"
    ),
    "ModelOutput": (
        "string name 1, DataType data_type 2, [int64] dims 3, string label_filename 4, ModelTensorReshape reshape 5, "
        "bool is_shape_tensor 6"
    ),
    "ModelTensorReshape": "[int64] shape 1",
    "ModelParameter": "string string_value 1",
    "ModelVersionPolicy": (
        "ModelVersionPolicy.Latest latest 1, ModelVersionPolicy.All all 2, ModelVersionPolicy.Specific specific 3"
    ),
    "ModelVersionPolicy.Latest": "uint32 num_versions 1",
    "ModelVersionPolicy.All": "",
    "ModelVersionPolicy.Specific": "[int64] versions 1",
    "ModelInstanceGroup": (
        "string name 1, int32 count 2, [int32] gpus 3, ModelInstanceGroup.Kind kind 4, [string] profile 5, "
        "bool passive 7, string host_policy 9"
    ),
    "ModelDynamicBatching": (
        "[int32] preferred_batch_size 1, uint64 max_queue_delay_microseconds 2, bool preserve_ordering 3, "
        "uint64 priority_levels 4, uint64 default_priority_level 5, ModelQueuePolicy default_queue_policy 6, "
        "{uint64 ModelQueuePolicy} priority_queue_policy 7"
    ),
    "ModelQueuePolicy": (
        "ModelQueuePolicy.TimeoutAction timeout_action 1, uint64 default_timeout_microseconds 2, "
        "bool allow_timeout_override 3, uint32 max_queue_size 4"
    ),
    "ModelOptimizationPolicy": (
        "ModelOptimizationPolicy.Graph graph 1, ModelOptimizationPolicy.ModelPriority priority 2, "
        "ModelOptimizationPolicy.Cuda cuda 3, "
        "ModelOptimizationPolicy.ExecutionAccelerators execution_accelerators 4, "
        "ModelOptimizationPolicy.PinnedMemoryBuffer input_pinned_memory 5, "
        "ModelOptimizationPolicy.PinnedMemoryBuffer output_pinned_memory 6, "
        "uint32 gather_kernel_buffer_threshold 7, bool eager_batching 8"
    ),
    "ModelOptimizationPolicy.Graph": "int32 level 1",
    "ModelOptimizationPolicy.Cuda": "bool graphs 1, bool busy_wait_events 2, bool output_copy_stream 4",
    "ModelOptimizationPolicy.ExecutionAccelerators": (
        "[ModelOptimizationPolicy.ExecutionAccelerators.Accelerator] gpu_execution_accelerator 1, "
        "[ModelOptimizationPolicy.ExecutionAccelerators.Accelerator] cpu_execution_accelerator 2"
    ),
    "ModelOptimizationPolicy.ExecutionAccelerators.Accelerator": "string name 1, {string} parameters 2",
    "ModelOptimizationPolicy.PinnedMemoryBuffer": "bool enable 1",
    "ModelWarmup": "string name 1, uint32 batch_size 2, {ModelWarmup.Input} inputs 3, uint32 count 4",
    "ModelWarmup.Input": (
        "DataType data_type 1, [int64] dims 2, bool zero_data 3, bool random_data 4, string input_data_file 5"
    ),
    "ModelTransactionPolicy": "bool decoupled 1",
    "ModelResponseCache": "bool enable 1",
}
_ENUMS = {
    "DataType": (
        "TYPE_INVALID TYPE_BOOL TYPE_UINT8 TYPE_UINT16 TYPE_UINT32 TYPE_UINT64 TYPE_INT8 TYPE_INT16 TYPE_INT32 "
        "TYPE_INT64 TYPE_FP16 TYPE_FP32 TYPE_FP64 TYPE_STRING TYPE_BF16"
    ),
    "ModelInput.Format": "FORMAT_NONE FORMAT_NHWC FORMAT_NCHW",
    "ModelInstanceGroup.Kind": "KIND_AUTO KIND_GPU KIND_CPU KIND_MODEL",
    "ModelQueuePolicy.TimeoutAction": "REJECT DELAY",
    "ModelOptimizationPolicy.ModelPriority": "PRIORITY_DEFAULT PRIORITY_MAX PRIORITY_MIN",
}


@cache
def classes() -> dict[str, Any]:
    """Message classes by name."""
    choices = dict.fromkeys(("InferParameter", "ModelRepositoryParameter"), "parameter_choice")
    return protobuf.classes(PACKAGE, _MESSAGES, _ENUMS, choices)
