module attributes {fsdp.model = "Tiny", fsdp.module_classes = {layers = "ModuleList", layers.0 = "Block", layers.0.fc = "Linear", layers.1 = "Block", layers.1.fc = "Linear", out = "Linear"}, fsdp.weights = "model.safetensors", fsdp.weights_hash = "xxh3:f3f8d78a7ff7321c90d237f5f97992b3"} {
  fsdp.mesh @world <["shard"=1]>
  fsdp.optimizer "adamw" {}
  fsdp.param @layers.0.fc.weight : tensor<4x4xf32>
  fsdp.param @layers.0.fc.bias : tensor<4xf32>
  fsdp.param @layers.1.fc.weight : tensor<4x4xf32>
  fsdp.param @layers.1.fc.bias : tensor<4xf32>
  fsdp.param @out.weight : tensor<2x4xf32>
  fsdp.param @out.bias : tensor<2xf32>
  fsdp.buffer @layers.0.scale : tensor<4xf32>
  fsdp.buffer @layers.1.scale : tensor<4xf32>
  fsdp.program @train_step(%arg0: tensor<2x4xf32> {fsdp.name = "x"}, %arg1: tensor<2x1xf32> {fsdp.name = "y"}) -> tensor<f32> {
    %0 = fsdp.read @layers.0.fc.weight : tensor<4x4xf32>
    %1 = fsdp.read @layers.0.fc.bias : tensor<4xf32>
    %2 = fsdp.read @layers.1.fc.weight : tensor<4x4xf32>
    %3 = fsdp.read @layers.1.fc.bias : tensor<4xf32>
    %4 = fsdp.read @out.weight : tensor<2x4xf32>
    %5 = fsdp.read @out.bias : tensor<2xf32>
    %6 = fsdp.read_buffer @layers.0.scale : tensor<4xf32>
    %7 = fsdp.read_buffer @layers.1.scale : tensor<4xf32>
    fsdp.phase forward
    %8 = aten.call "aten::t"(%0) {views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4x4xf32>
    %9 = aten.call "aten::addmm"(%1, %arg0, %8, 1, 1) : (tensor<4xf32>, tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
    %10 = aten.call "aten::tanh"(%9) : (tensor<2x4xf32>) -> tensor<2x4xf32>
    %11 = aten.call "aten::mul.Tensor"(%10, %6) : (tensor<2x4xf32>, tensor<4xf32>) -> tensor<2x4xf32>
    %12 = aten.call "aten::add.Tensor"(%arg0, %11, 1) : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<2x4xf32>
    %13 = aten.call "aten::t"(%2) {views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4x4xf32>
    %14 = aten.call "aten::addmm"(%3, %12, %13, 1, 1) : (tensor<4xf32>, tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
    %15 = aten.call "aten::tanh"(%14) : (tensor<2x4xf32>) -> tensor<2x4xf32>
    %16 = aten.call "aten::mul.Tensor"(%15, %7) : (tensor<2x4xf32>, tensor<4xf32>) -> tensor<2x4xf32>
    %17 = aten.call "aten::add.Tensor"(%12, %16, 1) : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<2x4xf32>
    %18 = aten.call "aten::t"(%4) {views = array<i64: 0>} : (tensor<2x4xf32>) -> tensor<4x2xf32>
    %19 = aten.call "aten::addmm"(%5, %17, %18, 1, 1) : (tensor<2xf32>, tensor<2x4xf32>, tensor<4x2xf32>) -> tensor<2x2xf32>
    %20:2 = aten.call "aten::split.Tensor"(%19, 1, 1) {views = array<i64: 0, 0>} : (tensor<2x2xf32>) -> (tensor<2x1xf32>, tensor<2x1xf32>)
    %21 = aten.call "aten::mul.Tensor"(%20#0, %20#1) : (tensor<2x1xf32>, tensor<2x1xf32>) -> tensor<2x1xf32>
    %22 = aten.call "aten::sub.Tensor"(%21, %arg1, 1) : (tensor<2x1xf32>, tensor<2x1xf32>) -> tensor<2x1xf32>
    %23 = aten.call "aten::pow.Tensor_Scalar"(%22, 2) : (tensor<2x1xf32>) -> tensor<2x1xf32>
    %24 = aten.call "aten::mean"(%23, none) : (tensor<2x1xf32>) -> tensor<f32>
    fsdp.phase backward
    %25 = aten.call "aten::ones_like"(%24, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
    %26 = aten.call "aten::expand"(%25, [2, 1], false) {views = array<i64: 0>} : (tensor<f32>) -> tensor<2x1xf32>
    %27 = aten.call "aten::div.Scalar"(%26, 2) : (tensor<2x1xf32>) -> tensor<2x1xf32>
    %28 = aten.call "aten::pow.Tensor_Scalar"(%22, 1.000000e+00) : (tensor<2x1xf32>) -> tensor<2x1xf32>
    %29 = aten.call "aten::mul.Scalar"(%28, 2.000000e+00) : (tensor<2x1xf32>) -> tensor<2x1xf32>
    %30 = aten.call "aten::mul.Tensor"(%27, %29) : (tensor<2x1xf32>, tensor<2x1xf32>) -> tensor<2x1xf32>
    %31 = aten.call "aten::mul.Tensor"(%30, %20#0) : (tensor<2x1xf32>, tensor<2x1xf32>) -> tensor<2x1xf32>
    %32 = aten.call "aten::mul.Tensor"(%30, %20#1) : (tensor<2x1xf32>, tensor<2x1xf32>) -> tensor<2x1xf32>
    %33 = aten.call "aten::cat"([%32, %31], 1) : (tensor<2x1xf32>, tensor<2x1xf32>) -> tensor<2x2xf32>
    %34 = aten.call "aten::t"(%18) {views = array<i64: 0>} : (tensor<4x2xf32>) -> tensor<2x4xf32>
    %35 = aten.call "aten::mm"(%33, %34) : (tensor<2x2xf32>, tensor<2x4xf32>) -> tensor<2x4xf32>
    %36 = aten.call "aten::t"(%33) {views = array<i64: 0>} : (tensor<2x2xf32>) -> tensor<2x2xf32>
    %37 = aten.call "aten::mm"(%36, %17) : (tensor<2x2xf32>, tensor<2x4xf32>) -> tensor<2x4xf32>
    %38 = aten.call "aten::t"(%37) {views = array<i64: 0>} : (tensor<2x4xf32>) -> tensor<4x2xf32>
    %39 = aten.call "aten::sum.dim_IntList"(%33, [0], true, none) : (tensor<2x2xf32>) -> tensor<1x2xf32>
    %40 = aten.call "aten::view"(%39, [2]) {views = array<i64: 0>} : (tensor<1x2xf32>) -> tensor<2xf32>
    %41 = aten.call "aten::t"(%38) {views = array<i64: 0>} : (tensor<4x2xf32>) -> tensor<2x4xf32>
    %42 = aten.call "aten::mul.Tensor"(%35, %7) : (tensor<2x4xf32>, tensor<4xf32>) -> tensor<2x4xf32>
    %43 = aten.call "aten::tanh_backward"(%42, %15) : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<2x4xf32>
    %44 = aten.call "aten::t"(%13) {views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4x4xf32>
    %45 = aten.call "aten::mm"(%43, %44) : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
    %46 = aten.call "aten::t"(%43) {views = array<i64: 0>} : (tensor<2x4xf32>) -> tensor<4x2xf32>
    %47 = aten.call "aten::mm"(%46, %12) : (tensor<4x2xf32>, tensor<2x4xf32>) -> tensor<4x4xf32>
    %48 = aten.call "aten::t"(%47) {views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4x4xf32>
    %49 = aten.call "aten::sum.dim_IntList"(%43, [0], true, none) : (tensor<2x4xf32>) -> tensor<1x4xf32>
    %50 = aten.call "aten::view"(%49, [4]) {views = array<i64: 0>} : (tensor<1x4xf32>) -> tensor<4xf32>
    %51 = aten.call "aten::add.Tensor"(%35, %45, 1) : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<2x4xf32>
    %52 = aten.call "aten::t"(%48) {views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4x4xf32>
    %53 = aten.call "aten::mul.Tensor"(%51, %6) : (tensor<2x4xf32>, tensor<4xf32>) -> tensor<2x4xf32>
    %54 = aten.call "aten::tanh_backward"(%53, %10) : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<2x4xf32>
    %55 = aten.call "aten::t"(%54) {views = array<i64: 0>} : (tensor<2x4xf32>) -> tensor<4x2xf32>
    %56 = aten.call "aten::mm"(%55, %arg0) : (tensor<4x2xf32>, tensor<2x4xf32>) -> tensor<4x4xf32>
    %57 = aten.call "aten::t"(%56) {views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4x4xf32>
    %58 = aten.call "aten::sum.dim_IntList"(%54, [0], true, none) : (tensor<2x4xf32>) -> tensor<1x4xf32>
    %59 = aten.call "aten::view"(%58, [4]) {views = array<i64: 0>} : (tensor<1x4xf32>) -> tensor<4xf32>
    %60 = aten.call "aten::t"(%57) {views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4x4xf32>
    fsdp.gradients [@layers.0.fc.weight, @layers.0.fc.bias, @layers.1.fc.weight, @layers.1.fc.bias, @out.weight, @out.bias] %60, %59, %52, %50, %41, %40 : tensor<4x4xf32>, tensor<4xf32>, tensor<4x4xf32>, tensor<4xf32>, tensor<2x4xf32>, tensor<2xf32>
    fsdp.return %24 : tensor<f32>
  }
}

