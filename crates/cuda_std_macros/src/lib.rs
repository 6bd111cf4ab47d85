//! The `#[kernel]` attribute of `cuda_std`.

use proc_macro::TokenStream;
use quote::quote;
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::{Ident, ItemFn, LitInt, Token, parse_macro_input, spanned::Spanned};

/// Launch bounds, as `#[kernel(max_threads = 256, min_blocks = 2)]` gives them.
#[derive(Default)]
struct Bounds {
    max_threads: Option<u32>,
    min_blocks: Option<u32>,
    max_registers: Option<u32>,
}

impl Parse for Bounds {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        let mut bounds = Bounds::default();
        let pairs = Punctuated::<Pair, Token![,]>::parse_terminated(input)?;
        for Pair { key, value } in pairs {
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
            *slot = Some(value);
        }
        Ok(bounds)
    }
}

struct Pair {
    key: Ident,
    value: u32,
}

impl Parse for Pair {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        let key = input.parse()?;
        input.parse::<Token![=]>()?;
        Ok(Pair { key, value: input.parse::<LitInt>()?.base10_parse()? })
    }
}

/// Marks a function as a kernel: on the device a PTX entry point under its own name, on the host a plain function.
///
/// `#[kernel(max_threads = N, min_blocks = N, max_registers = N)]` sets `.maxntid`, `.minnctapersm` and `.maxnreg`.
/// rustc cannot emit these directives, so the attribute leaves a comment in the PTX, which `cuda_builder` turns into
/// the directives of the entry.
#[proc_macro_attribute]
pub fn kernel(bounds: TokenStream, item: TokenStream) -> TokenStream {
    let bounds = parse_macro_input!(bounds as Bounds);
    let function = parse_macro_input!(item as ItemFn);
    if function.sig.unsafety.is_none() || function.sig.abi.is_some() {
        let message = "a kernel is declared `pub unsafe fn`, without an ABI of its own";
        return syn::Error::new(function.sig.span(), message).to_compile_error().into();
    }
    let ItemFn { attrs, vis, sig, block } = function;
    let syn::Signature { ident, inputs, generics, .. } = &sig;
    if !generics.params.is_empty() {
        let message = "a kernel is an entry point and cannot be generic: call a generic body from it";
        return syn::Error::new(generics.span(), message).to_compile_error().into();
    }
    let directives = [
        bounds.max_threads.map(|n| format!(".maxntid {n}, 1, 1")),
        bounds.min_blocks.map(|n| format!(".minnctapersm {n}")),
        bounds.max_registers.map(|n| format!(".maxnreg {n}")),
    ];
    let directives: Vec<String> = directives.into_iter().flatten().collect();
    let marker = (!directives.is_empty()).then(|| {
        let text = format!("//cuda_std.kernel {ident} {}", directives.join(" "));
        quote! { #[cfg(target_arch = "nvptx64")] ::core::arch::global_asm!(#text); }
    });
    quote! {
        #marker
        #(#attrs)*
        #[cfg(target_arch = "nvptx64")]
        #[unsafe(no_mangle)]
        #vis unsafe extern "ptx-kernel" fn #ident(#inputs) #block

        #(#attrs)*
        #[cfg(not(target_arch = "nvptx64"))]
        #[allow(clippy::too_many_arguments)]
        #vis unsafe fn #ident(#inputs) #block
    }
    .into()
}
