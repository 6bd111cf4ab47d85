//! The `#[kernel]` attribute of `cuda_std`.

use proc_macro2::TokenStream;
use quote::quote;
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::{
    Attribute, FnArg, Ident, ItemFn, LitInt, Pat, PatIdent, ReturnType, Token, Type, spanned::Spanned,
};

/// Launch bounds, as `#[kernel(max_threads = 256, min_blocks = 2)]` gives them, and who waits.
#[derive(Default)]
struct Bounds {
    max_threads: Option<u32>,
    min_blocks: Option<u32>,
    max_registers: Option<u32>,
    /// The body waits for the kernel ahead itself.
    waits: bool,
}

impl Parse for Bounds {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        let mut bounds = Bounds::default();
        let pairs = Punctuated::<Pair, Token![,]>::parse_terminated(input)?;
        for Pair { key, value } in pairs {
            let Some(value) = value else {
                if core::mem::replace(&mut bounds.waits, true) {
                    return Err(syn::Error::new(key.span(), "`waits` is given twice"));
                }
                continue;
            };
            let slot = match key.to_string().as_str() {
                "max_threads" => &mut bounds.max_threads,
                "min_blocks" => &mut bounds.min_blocks,
                "max_registers" => &mut bounds.max_registers,
                other => {
                    let message =
                        format!("unknown bound `{other}`: expected max_threads, min_blocks or max_registers");
                    return Err(syn::Error::new(key.span(), message));
                }
            };
            if slot.replace(value).is_some() {
                return Err(syn::Error::new(key.span(), format!("bound `{key}` is given twice")));
            }
        }
        Ok(bounds)
    }
}

struct Pair {
    key: Ident,
    /// None of `waits`.
    value: Option<u32>,
}

impl Parse for Pair {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        let key: Ident = input.parse()?;
        if key == "waits" {
            return Ok(Pair { key, value: None });
        }
        input.parse::<Token![=]>()?;
        let literal = input.parse::<LitInt>()?;
        match literal.base10_parse()? {
            0 => Err(syn::Error::new(literal.span(), format!("bound `{key}` is at least 1"))),
            value => Ok(Pair { key, value: Some(value) }),
        }
    }
}

/// Marks a function as a kernel: on the device a PTX entry point under its own name, on the host a plain function.
///
/// `#[kernel(max_threads = N, min_blocks = N, max_registers = N)]` sets `.maxntid`, `.minnctapersm` and `.maxnreg`.
/// rustc cannot emit these directives, so the attribute leaves a comment in the PTX, which `cuda_builder` turns into
/// the directives of the entry.
///
/// A parameter marked `#[grid_constant]` is passed by value, and the body sees its address in parameter memory: a
/// `*const` of its type, for tensor maps. rustc would copy it to local memory for that.
///
/// On Hopper a kernel first waits for the one ahead of it in its stream (`cuda_std::grid::begin`), so that it may be
/// launched while that still runs. With `#[kernel(waits)]` its body does so, before it touches global memory.
///
/// On the host the kernel can also be found by its name (`cuda_std::sim::kernel`) and called as the driver would: with
/// the addresses of its parameters.
#[proc_macro_attribute]
pub fn kernel(bounds: proc_macro::TokenStream, item: proc_macro::TokenStream) -> proc_macro::TokenStream {
    expand(bounds.into(), item.into()).unwrap_or_else(|error| error.to_compile_error()).into()
}

fn expand(bounds: TokenStream, item: TokenStream) -> syn::Result<TokenStream> {
    let bounds: Bounds = syn::parse2(bounds)?;
    let ItemFn { attrs, vis, sig, block } = syn::parse2(item)?;
    let qualified = sig.abi.is_some() || sig.asyncness.is_some() || sig.constness.is_some();
    if sig.unsafety.is_none() || qualified {
        let message = "a kernel is declared `pub unsafe fn`, without an ABI of its own";
        return Err(syn::Error::new(sig.span(), message));
    }
    if let ReturnType::Type(_, output) = &sig.output {
        return Err(syn::Error::new(
            output.span(),
            "a kernel returns nothing: it writes through its pointers",
        ));
    }
    let syn::Signature { ident, inputs, generics, .. } = &sig;
    if !generics.params.is_empty() {
        let message = "a kernel is an entry point and cannot be generic: call a generic body from it";
        return Err(syn::Error::new(generics.span(), message));
    }
    let statements = &block.stmts;
    let wait = (!bounds.waits).then(|| quote!(::cuda_std::grid::begin();));
    let (inputs, constants) = grid_constants(ident, inputs)?;
    let types = inputs.iter().map(parameter_type).collect::<syn::Result<Vec<&Type>>>()?;
    let directives = [
        bounds.max_threads.map(|n| format!(".maxntid {n}, 1, 1")),
        bounds.min_blocks.map(|n| format!(".minnctapersm {n}")),
        bounds.max_registers.map(|n| format!(".maxnreg {n}")),
    ];
    let directives: Vec<String> = directives.into_iter().flatten().collect();
    // Where the kernel is configured out, its marker and its entry in the registry must be too.
    let conditions: Vec<&Attribute> = attrs.iter().filter(|attr| attr.path().is_ident("cfg")).collect();
    let marker = (!directives.is_empty()).then(|| {
        let text = format!("//cuda_std.kernel {ident} {}", directives.join(" "));
        quote! {
            #(#conditions)*
            #[cfg(target_arch = "nvptx64")]
            ::core::arch::global_asm!(#text);
        }
    });
    let max_threads = match bounds.max_threads {
        Some(n) => quote!(::core::option::Option::Some(#n)),
        None => quote!(::core::option::Option::None),
    };
    let indices = 0..types.len();
    Ok(quote! {
        #marker
        #(#attrs)*
        #[cfg(target_arch = "nvptx64")]
        #[unsafe(no_mangle)]
        #vis unsafe extern "ptx-kernel" fn #ident(#inputs) {
            #(#constants)*
            #wait
            #(#statements)*
        }

        #(#attrs)*
        #[cfg(not(target_arch = "nvptx64"))]
        #[allow(clippy::too_many_arguments)]
        #vis unsafe fn #ident(#inputs) {
            #(#constants)*
            #(#statements)*
        }

        #(#conditions)*
        #[cfg(not(target_arch = "nvptx64"))]
        const _: () = {
            #[allow(clippy::undocumented_unsafe_blocks)]
            unsafe fn launch(params: &[*const ::core::ffi::c_void]) {
                unsafe { #ident(#(params[#indices].cast::<#types>().read()),*) }
            }
            ::cuda_std::sim::inventory::submit! {
                ::cuda_std::sim::Kernel {
                    name: ::core::stringify!(#ident),
                    max_threads: #max_threads,
                    params: &[#(::core::mem::size_of::<#types>()),*],
                    launch,
                }
            }
        };
    })
}

/// Parameters marked `#[grid_constant]`: the list without the marks, and what turns each into its address.
fn grid_constants(
    kernel: &Ident,
    inputs: &Punctuated<FnArg, Token![,]>,
) -> syn::Result<(Punctuated<FnArg, Token![,]>, Vec<TokenStream>)> {
    let mut inputs = inputs.clone();
    let mut constants = Vec::new();
    for (index, input) in inputs.iter_mut().enumerate() {
        let FnArg::Typed(typed) = input else { continue };
        let marks = typed.attrs.len();
        typed.attrs.retain(|attr| !attr.path().is_ident("grid_constant"));
        if typed.attrs.len() == marks {
            continue;
        }
        let Pat::Ident(PatIdent { ident: name, .. }) = &*typed.pat else {
            return Err(syn::Error::new(typed.pat.span(), "a `#[grid_constant]` parameter has a plain name"));
        };
        let (name, ty, index) = (name.clone(), typed.ty.clone(), index.to_string());
        constants.push(quote!(let #name: *const #ty = ::cuda_std::grid_constant!(#kernel, #index, #name);));
    }
    Ok((inputs, constants))
}

fn parameter_type(input: &FnArg) -> syn::Result<&Type> {
    match input {
        FnArg::Typed(typed) => Ok(&typed.ty),
        FnArg::Receiver(_) => {
            Err(syn::Error::new(input.span(), "a kernel is a free function, without `self`"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(bounds: &str, item: &str) -> String {
        let [bounds, item] = [bounds, item].map(|text| text.parse().expect("tokens"));
        expand(bounds, item).expect_err("an error").to_string()
    }

    /// Spaces aside, which a token stream prints as it likes.
    fn expansion(bounds: &str, item: &str) -> String {
        let [bounds, item] = [bounds, item].map(|text| text.parse().expect("tokens"));
        let text = expand(bounds, item).expect("an expansion").to_string();
        text.split_whitespace().collect()
    }

    #[test]
    fn what_is_not_a_kernel() {
        let declared = "a kernel is declared `pub unsafe fn`, without an ABI of its own";
        let generic = "a kernel is an entry point and cannot be generic: call a generic body from it";
        let returns = "a kernel returns nothing: it writes through its pointers";
        for (item, expected) in [
            ("pub fn k() {}", declared),
            ("pub unsafe extern \"C\" fn k() {}", declared),
            ("pub unsafe extern \"ptx-kernel\" fn k() {}", declared),
            ("pub async unsafe fn k() {}", declared),
            ("pub const unsafe fn k() {}", declared),
            ("pub unsafe fn k<T>(x: T) {}", generic),
            ("pub unsafe fn k<const N: usize>() {}", generic),
            ("pub unsafe fn k<'a>(x: &'a u32) {}", generic),
            ("pub unsafe fn k() -> u32 { 1 }", returns),
            ("pub unsafe fn k(&self) {}", "a kernel is a free function, without `self`"),
            ("pub struct K;", "expected `fn`"),
        ] {
            assert_eq!(message("", item), expected, "{item}");
        }
    }

    #[test]
    fn bounds_that_are_not_understood() {
        for (bounds, expected) in [
            (
                "max_thread = 256",
                "unknown bound `max_thread`: expected max_threads, min_blocks or max_registers",
            ),
            ("max_threads = 32, max_threads = 64", "bound `max_threads` is given twice"),
            ("max_registers = 0", "bound `max_registers` is at least 1"),
            ("max_threads = -1", "invalid digit found in string"),
            ("max_threads = \"256\"", "expected integer literal"),
            ("max_threads = N", "expected integer literal"),
            ("max_threads = 4294967296", "number too large to fit in target type"),
            ("max_threads", "expected `=`"),
            ("256", "expected identifier"),
            ("max_threads = 256 min_blocks = 2", "expected `,`"),
            ("waits, waits", "`waits` is given twice"),
            ("waits = 1", "expected `,`"),
        ] {
            assert_eq!(message(bounds, "pub unsafe fn k() {}"), expected, "{bounds}");
        }
    }

    #[test]
    fn bounds_become_one_comment_in_a_fixed_order() {
        let text =
            expansion("min_blocks = 2, max_registers = 64, max_threads = 1_024,", "pub unsafe fn k() {}");
        assert!(text.contains("\"//cuda_std.kernelk.maxntid1024,1,1.minnctapersm2.maxnreg64\""), "{text}");
        assert_eq!(text.matches("global_asm!").count(), 1, "{text}");
        assert!(!expansion("", "pub unsafe fn k() {}").contains("global_asm"));
    }

    #[test]
    fn an_entry_on_the_device_and_a_function_on_the_host() {
        let text =
            expansion("", "/** Text. */ pub(crate) unsafe fn k(out: *mut f32, n: u32) { body(out, n) }");
        let device = "#[cfg(target_arch=\"nvptx64\")]#[unsafe(no_mangle)]\
                      pub(crate)unsafeextern\"ptx-kernel\"fnk(out:*mutf32,n:u32){\
                      ::cuda_std::grid::begin();body(out,n)}";
        let host = "pub(crate)unsafefnk(out:*mutf32,n:u32){body(out,n)}";
        assert!(text.contains(device) && text.contains(host), "{text}");
        assert_eq!(text.matches("Text.").count(), 2, "{text}");
    }

    #[test]
    fn a_kernel_that_waits_itself() {
        let text = expansion("max_threads = 32, waits", "pub unsafe fn k() { body() }");
        assert!(!text.contains("grid::begin") && text.contains("maxntid32"), "{text}");
    }

    #[test]
    fn a_grid_constant_is_seen_by_its_address() {
        let text =
            expansion("", "pub unsafe fn k(x: *mut u32, #[grid_constant] map: TensorMap) { body(map) }");
        let signature =
            "fnk(x:*mutu32,map:TensorMap){letmap:*constTensorMap=::cuda_std::grid_constant!(k,\"1\",map);";
        assert_eq!(text.matches(signature).count(), 2, "{text}");
        let plain = message("", "pub unsafe fn k(#[grid_constant] (a, b): (u32, u32)) {}");
        assert_eq!(plain, "a `#[grid_constant]` parameter has a plain name");
    }

    #[test]
    fn a_kernel_configured_out_leaves_no_comment() {
        let text = expansion("max_threads = 32", "#[cfg(feature = \"x\")] #[doc(hidden)] unsafe fn k() {}");
        let marker = "#[cfg(feature=\"x\")]#[cfg(target_arch=\"nvptx64\")]::core::arch::global_asm!(";
        assert!(text.starts_with(marker), "{text}");
    }

    #[test]
    fn the_host_knows_kernels_by_name() {
        let text = expansion("max_threads = 256", "pub unsafe fn k(out: *mut f32, mut dims: Dims) {}");
        let registration = "#[cfg(not(target_arch=\"nvptx64\"))]const_:()={\
                            #[allow(clippy::undocumented_unsafe_blocks)]\
                            unsafefnlaunch(params:&[*const::core::ffi::c_void]){\
                            unsafe{k(params[0usize].cast::<*mutf32>().read(),params[1usize].cast::<Dims>().read())}}\
                            ::cuda_std::sim::inventory::submit!{::cuda_std::sim::Kernel{\
                            name:::core::stringify!(k),max_threads:::core::option::Option::Some(256u32),\
                            params:&[::core::mem::size_of::<*mutf32>(),::core::mem::size_of::<Dims>()],launch,}}};";
        assert!(text.ends_with(registration), "{text}");
        assert!(expansion("", "unsafe fn k() {}").contains("max_threads:::core::option::Option::None"));
        let text = expansion("", "#[cfg(feature = \"x\")] unsafe fn k() {}");
        assert!(
            text.contains("#[cfg(feature=\"x\")]#[cfg(not(target_arch=\"nvptx64\"))]const_:()="),
            "{text}"
        );
    }
}
