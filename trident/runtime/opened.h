/* Private members of torch's classes that guards read at each call: an explicit instantiation may name
 * them, as access rules do not apply to its arguments. Where they are is up to the installed torch's
 * headers; a torch without one of them does not compile.
 *
 *   struct Name { friend constexpr auto member(Name); };
 *   template struct Opened<Name, &Class::member_>;
 *   ... object.*member(Name{}) ... */
#ifndef TRIDENT_OPENED_H
#define TRIDENT_OPENED_H

namespace trident {

template <class Name, auto Member>
struct Opened {
  friend constexpr auto member(Name) { return Member; }
};

} // namespace trident
#endif
