//! One module per collective.

macro_rules! modules {
    ($($collective:ident $feature:literal $tables:tt;)*) => {
        $(
            #[cfg(feature = $feature)]
            pub mod $collective;
        )*
    };
}
abi::for_each_collective!(modules);
