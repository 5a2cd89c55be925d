/* Exports the rule that schedules copies (copy_rule.h) as plain functions, for cotenant.native.rules. */
#include "shim/copies/copy_rule.h"

#define EXPORT __attribute__((visibility("default")))
EXPORT int queue_try(struct cotenant_copy_page *page, unsigned direction, unsigned queue, unsigned participant,
                     uint64_t bytes, uint64_t now_ns, struct copy_ticket *ticket)
{
    return copy_try(page, direction, queue, participant, bytes, now_ns, ticket);
}
EXPORT void queue_done(struct cotenant_copy_page *page, unsigned direction, const struct copy_ticket *ticket)
{
    copy_done(page, direction, *ticket);
}
EXPORT void queue_withdraw(struct cotenant_copy_page *page, unsigned direction, unsigned queue)
{
    copy_withdraw(page, direction, queue);
}
EXPORT void queue_charge(struct cotenant_copy_page *page, unsigned direction, unsigned queue, uint64_t bytes)
{
    copy_charge(page, &page->links[direction], queue, bytes);
}
EXPORT unsigned queue_next(const struct cotenant_copy_page *page, unsigned direction, uint64_t now_ns)
{
    return copy_next(page, &page->links[direction], now_ns);
}
EXPORT void queue_rescue(struct cotenant_copy_page *page, unsigned direction, unsigned queue, uint64_t now_ns)
{
    copy_rescue(page, direction, queue, now_ns);
}
EXPORT uint64_t queue_piece(const struct cotenant_copy_page *page, unsigned direction, unsigned queue, uint64_t now_ns)
{
    return copy_piece(page, direction, queue, now_ns);
}
