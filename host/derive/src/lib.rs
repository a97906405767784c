//! `#[derive(Problem)]`: the code and the remedy of an error stand next to its message.
#![forbid(unsafe_code)]

use proc_macro::TokenStream;
use proc_macro2::TokenStream as Tokens;
use quote::{format_ident, quote};
use syn::punctuated::Punctuated;
use syn::{Attribute, Data, DeriveInput, Expr, Field, Fields, Ident, Token, Variant, parse_macro_input};

/// Implements `firn_host::Problem` for an enum or a struct.
///
/// | attribute of a variant or struct | remedy |
/// |---|---|
/// | `#[problem("FIRN-CODE", "hint")]` | this code and this hint; both may be any expression |
/// | `#[problem(expression)]` | that expression, a `Remedy` |
/// | none, and `#[error(transparent)]` | that of the only field |
/// | none | that of the enum's attribute; without one, that of the only field |
///
/// Expressions can use the fields, as references, by their names; those of a tuple are `_0`, `_1`.
///
/// # Errors
/// A variant without an attribute does not compile where it has no field, more than one, or one that is no
/// `Problem`.
#[proc_macro_derive(Problem, attributes(problem))]
pub fn derive_problem(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    implementation(&input)
        .unwrap_or_else(syn::Error::into_compile_error)
        .into()
}

fn implementation(input: &DeriveInput) -> syn::Result<Tokens> {
    let name = &input.ident;
    let default = attribute(&input.attrs)?;
    let arms = match &input.data {
        Data::Enum(data) => {
            let arm = |variant: &Variant| {
                let own = attribute(&variant.attrs)?;
                let default = default.clone().filter(|_| !is_transparent(&variant.attrs));
                let remedy = own.or(default);
                let path = &variant.ident;
                arm(&quote! { Self::#path }, &variant.fields, remedy)
            };
            data.variants.iter().map(arm).collect::<syn::Result<Vec<_>>>()?
        }
        Data::Struct(data) => vec![arm(&quote! { Self }, &data.fields, default)?],
        Data::Union(_) => return Err(syn::Error::new_spanned(name, "a union cannot be a problem")),
    };
    Ok(quote! {
        impl ::firn_host::Problem for #name {
            #[allow(unused_variables)]
            fn remedy(&self) -> ::firn_host::Remedy<'_> {
                match self { #(#arms)* }
            }
        }
    })
}

/// Whether the message is that of the only field.
fn is_transparent(attributes: &[Attribute]) -> bool {
    let mut errors = attributes.iter().filter(|found| found.path().is_ident("error"));
    errors.any(|error| {
        error
            .parse_args::<Ident>()
            .is_ok_and(|word| word == "transparent")
    })
}

/// What `#[problem(...)]` names, where there is one.
fn attribute(attributes: &[Attribute]) -> syn::Result<Option<Tokens>> {
    let Some(attribute) = attributes.iter().find(|found| found.path().is_ident("problem")) else {
        return Ok(None);
    };
    let arguments = attribute.parse_args_with(Punctuated::<Expr, Token![,]>::parse_terminated)?;
    match arguments.iter().collect::<Vec<_>>()[..] {
        [remedy] => Ok(Some(quote! { #remedy })),
        [code, hint] => Ok(Some(quote! { ::firn_host::remedy(#code, #hint) })),
        _ => Err(syn::Error::new_spanned(
            attribute,
            "wants a code and a hint, or a remedy",
        )),
    }
}

/// The arm of the match for a variant or a struct.
fn arm(path: &Tokens, fields: &Fields, remedy: Option<Tokens>) -> syn::Result<Tokens> {
    let named = |(index, field): (usize, &Field)| field.ident.clone().unwrap_or(format_ident!("_{index}"));
    let names: Vec<Ident> = fields.iter().enumerate().map(named).collect();
    let remedy = match (remedy, &names[..]) {
        (Some(remedy), _) => remedy,
        (None, [name]) => quote! { ::firn_host::Problem::remedy(#name) },
        (None, _) => {
            let message =
                "#[problem(\"FIRN-CODE\", \"hint\")] is missing: no single field can have the remedy";
            return Err(syn::Error::new_spanned(path, message));
        }
    };
    let pattern = match fields {
        Fields::Named(_) => quote! { { #(#names),* } },
        Fields::Unnamed(_) => quote! { ( #(#names),* ) },
        Fields::Unit => quote! {},
    };
    Ok(quote! { #path #pattern => #remedy, })
}
