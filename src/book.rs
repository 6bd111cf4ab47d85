//! The programs of `docs/book`, which are compiled and run as those of the documentation are.

#[doc = include_str!("../docs/book/src/first_kernel.md")]
struct FirstKernel;

#[doc = include_str!("../docs/book/src/first_model.md")]
struct FirstModel;

#[doc = include_str!("../docs/book/src/engine.md")]
struct Engine;

#[doc = include_str!("../docs/book/src/without_a_gpu.md")]
struct WithoutAGpu;

#[doc = include_str!("../docs/book/src/adding_an_operator.md")]
struct AddingAnOperator;
