//! One module per operator.

macro_rules! modules {
    ($($op:ident $feature:literal $tables:tt;)*) => {
        $(
            #[cfg(feature = $feature)]
            pub mod $op;
        )*
    };
}
abi::for_each_operator!(modules);
